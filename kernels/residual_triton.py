"""The passes of `residual.py` in Triton: each value is read and written once.

Rounding follows torch's operations one by one, so that serving and training see the same bits but
for the order of a sum of squares. Shapes: N tokens, E hidden, F ff of an expert, M = N*P picks.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202  (a jit kernel's annotations are constexpr only)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from m1serve.kernels.after_triton import bring_to_l2, pdl, release, wait
from m1serve.kernels.moe_decode import gated
from m1serve.kernels.norm_triton import tiling
from m1serve.kernels.residual import Normed, Picks, Sum

VALUES_A_THREAD = 32
FEW_TOKENS = 64
"""Of a step whose norms wait for the weight, which the layers before have driven out of L2."""
SWIGLU_ROWS, SWIGLU_COLUMNS = 4, 1024


def fused_norm(x: Tensor | Sum, weight_E: Tensor, eps: float, *, keeps_sum: bool) -> Normed:
    """`residual.rms_norm_of_sum`; without `keeps_sum` the sum is not written, and x is no sum."""
    first = x.residual if isinstance(x, Sum) else x
    E = first.shape[-1]
    first_NE = first.reshape(-1, E).contiguous()
    N = first_NE.shape[0]
    normed_NE = torch.empty(N, E, dtype=weight_E.dtype, device=first.device)
    sum_NE = torch.empty_like(first_NE) if keeps_sum else first_NE
    y_ME, place_M, num_chosen, alpha, beta = first_NE, None, 0, 1.0, 1.0
    if isinstance(x, Sum):
        alpha, beta = x.alpha, x.beta
        branch = x.branch if isinstance(x.branch, Picks) else Picks(x.branch, None, 1)
        y_ME, place_M, num_chosen = branch.y_ME.reshape(-1, E).contiguous(), *branch[1:]
    if N:
        with torch.cuda.device_of(first):
            norm_kernel[(N,)](
                *(first_NE, y_ME, y_ME if place_M is None else place_M, weight_E.contiguous()),
                *(sum_NE, normed_NE),
                *(E, alpha, beta, eps),
                TERMS=num_chosen,
                PLACED=place_M is not None,
                KEEPS=keeps_sum,
                AHEAD=N <= FEW_TOKENS,
                **tiling(E, values_a_thread=VALUES_A_THREAD),
                **pdl(first),
            )
    return Normed(sum_NE.view(first.shape), normed_NE.view(first.shape))


def sum_picks(y_ME: Tensor, place_M: Tensor | None, num_chosen: int) -> Tensor:
    """`residual.Picks.total`."""
    y_ME = y_ME.contiguous()
    N, E = y_ME.shape[0] // num_chosen, y_ME.shape[1]
    out_NE = y_ME.new_empty(N, E)
    if N:
        with torch.cuda.device_of(y_ME):
            picks_kernel[(N,)](
                *(y_ME, y_ME if place_M is None else place_M, out_NE),
                E,
                TERMS=num_chosen,
                PLACED=place_M is not None,
                **tiling(E, values_a_thread=VALUES_A_THREAD),
                **pdl(y_ME),
            )
    return out_NE


def swiglu(h_M2F: Tensor, weight_M1: Tensor) -> Tensor:
    """`residual.swiglu_weighted` of contiguous tensors."""
    M, ff = h_M2F.shape[0], h_M2F.shape[1] // 2
    z_MF = h_M2F.new_empty(M, ff)
    num_programs = triton.cdiv(M, SWIGLU_ROWS) * triton.cdiv(ff, SWIGLU_COLUMNS)
    if num_programs:
        with torch.cuda.device_of(h_M2F):
            swiglu_kernel[(num_programs,)](
                *(h_M2F, weight_M1, z_MF),
                *(M, ff),
                ROWS=SWIGLU_ROWS,
                COLUMNS=SWIGLU_COLUMNS,
                num_warps=4,
                # said, because triton 3.9 warns where its default is taken
                enable_fp_fusion=True,
                **pdl(h_M2F),
            )
    return z_MF


@triton.jit
def norm_kernel(
    residual_NE,
    y_ME,
    place_M,
    weight_E,
    sum_NE,
    normed_NE,
    num_hidden,
    alpha,
    beta,
    eps,
    TERMS: tl.constexpr,
    PLACED: tl.constexpr,
    KEEPS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_I: tl.constexpr,
    WAIT: tl.constexpr,
):
    """A token a program. No TERMS: there is only the residual."""
    release(WAIT)
    if WAIT and AHEAD and BLOCK_I >= 64:
        bring_to_l2(weight_E + tl.minimum(tl.arange(0, BLOCK_I // 64) * 64, num_hidden - 1))
    wait(WAIT)
    n = tl.program_id(0).to(tl.int64)
    i_E = tl.arange(0, BLOCK_I)
    real_E = i_E < num_hidden
    DTYPE: tl.constexpr = residual_NE.dtype.element_ty
    w_E = tl.load(weight_E + i_E, mask=real_E, other=0.0).to(tl.float32)
    x_E = tl.load(residual_NE + n * num_hidden + i_E, mask=real_E, other=0.0)
    if TERMS > 0:
        y_E = _picked(y_ME, place_M, n, i_E, real_E, num_hidden, TERMS, PLACED, BLOCK_I)
        # as residual * alpha + y * beta in torch: each product and the sum are rounded
        part_E = (x_E.to(tl.float32) * alpha).to(DTYPE).to(tl.float32)
        x_E = (part_E + (y_E * beta).to(DTYPE).to(tl.float32)).to(DTYPE)
    if KEEPS:
        tl.store(sum_NE + n * num_hidden + i_E, x_E, mask=real_E)
    x_E = x_E.to(tl.float32)
    r = tl.rsqrt(tl.sum(x_E * x_E) / num_hidden + eps)
    normed_E = (x_E * r * w_E).to(normed_NE.dtype.element_ty)
    tl.store(normed_NE + n * num_hidden + i_E, normed_E, mask=real_E)


@triton.jit
def picks_kernel(
    y_ME,
    place_M,
    out_NE,
    num_hidden,
    TERMS: tl.constexpr,
    PLACED: tl.constexpr,
    BLOCK_I: tl.constexpr,
    WAIT: tl.constexpr,
):
    release(WAIT)
    wait(WAIT)
    n = tl.program_id(0).to(tl.int64)
    i_E = tl.arange(0, BLOCK_I)
    real_E = i_E < num_hidden
    y_E = _picked(y_ME, place_M, n, i_E, real_E, num_hidden, TERMS, PLACED, BLOCK_I)
    tl.store(out_NE + n * num_hidden + i_E, y_E.to(out_NE.dtype.element_ty), mask=real_E)


@triton.jit
def _picked(
    y_ME,
    place_M,
    n,
    i_E,
    real_E,
    num_hidden,
    TERMS: tl.constexpr,
    PLACED: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """The token's rows added in fp32 in the order of its picks, rounded to y's dtype, as fp32."""
    total_E = tl.zeros([BLOCK_I], dtype=tl.float32)
    for term in tl.static_range(TERMS):
        row = n * TERMS + term
        if PLACED:
            row = tl.load(place_M + row)
        total_E += tl.load(y_ME + row * num_hidden + i_E, mask=real_E, other=0.0).to(tl.float32)
    return total_E.to(y_ME.dtype.element_ty).to(tl.float32)


@triton.jit
def swiglu_kernel(
    h_M2F,
    weight_M,
    z_MF,
    num_picks,
    num_inner,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WAIT: tl.constexpr,
):
    release(WAIT)
    wait(WAIT)
    num_columns = tl.cdiv(num_inner, COLUMNS)
    m_R = (tl.program_id(0) // num_columns) * ROWS + tl.arange(0, ROWS)
    i_F = (tl.program_id(0) % num_columns) * COLUMNS + tl.arange(0, COLUMNS)
    real_R = m_R < num_picks
    real_RF = real_R[:, None] & (i_F < num_inner)[None, :]
    m_R = m_R.to(tl.int64)
    h_ptr_RF = h_M2F + m_R[:, None] * (2 * num_inner) + i_F[None, :]
    a_RF = tl.load(h_ptr_RF, mask=real_RF, other=0.0)
    b_RF = tl.load(h_ptr_RF + num_inner, mask=real_RF, other=0.0)
    weight_R = tl.load(weight_M + m_R, mask=real_R, other=0.0).to(tl.float32)
    z_RF = gated(a_RF, b_RF, weight_R[:, None], z_MF.dtype.element_ty)
    tl.store(z_MF + m_R[:, None] * num_inner + i_F[None, :], z_RF, mask=real_RF)
