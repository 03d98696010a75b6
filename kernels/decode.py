"""One decode step of lightning attention in Triton, in place in a pool of states.

A program owns one tile of BLOCK_V value columns of one head's state: it is read and written once.
Inputs are taken as checked (`checks.check_decode`); importing this module imports triton.
Shapes: B rows, H heads, D head dim, S slots; tiles are K x V (keys x BLOCK_V values).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202  (triton.jit reads the annotations of a kernel: constexpr only)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from m1serve.kernels import decode_hopper
except (ImportError, AttributeError):  # a triton without Gluon, or with another Gluon
    decode_hopper = None  # type: ignore[assignment]


def decode(
    q_BHD: Tensor,
    k_BHD: Tensor,
    v_BHD: Tensor,
    slope_H: Tensor,
    pool_SHDD: Tensor,
    slot_B: Tensor,
    *,
    silu: bool = False,
    out_BHD: Tensor | None = None,
) -> Tensor:
    """o [B, H, D] in q's dtype; the slots' fp32 states take the token in place.

    Row b reads and writes pool[slot_B[b]]; a negative slot gives zeros and touches no state, one
    past the pool gives NaN. Two rows of one call must not share a slot, nor may `out` overlap q, k
    or v. `silu` applies SiLU to q, k and v, rounded to their dtype. Nothing is read back by the
    host, so it can be captured.
    """
    B, H, D = q_BHD.shape
    if out_BHD is None:
        out_BHD = torch.empty((B, H, D), dtype=q_BHD.dtype, device=q_BHD.device)
    o_BHD = out_BHD
    if B == 0:
        return o_BHD
    if decode_hopper is not None and decode_hopper.fits(q_BHD):
        return decode_hopper.decode(
            q_BHD, k_BHD, v_BHD, slope_H, pool_SHDD, slot_B, silu=silu, out_BHD=o_BHD
        )
    options = tiling(D)
    _decode[(D // options["BLOCK_V"], H, B)](
        q_BHD,
        k_BHD,
        v_BHD,
        o_BHD,
        slope_H,
        pool_SHDD,
        slot_B,
        *q_BHD.stride()[:2],
        *k_BHD.stride()[:2],
        *v_BHD.stride()[:2],
        *o_BHD.stride()[:2],
        pool_SHDD.stride(0),
        pool_SHDD.shape[0],
        SILU=silu,
        D=D,
        # said, because triton 3.9 warns where its default is taken
        enable_fp_fusion=True,
        **options,
    )
    return o_BHD


def tiling(head_dim: int) -> dict[str, int]:
    """One tile for any number of rows, so that no row's bits depend on how many there are."""
    return {"BLOCK_V": min(64, head_dim), "num_warps": 8}


@triton.jit
def _decode(
    q_BHD,
    k_BHD,
    v_BHD,
    o_BHD,
    slope_H,
    pool_SHDD,
    slot_B,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    o_row,
    o_head,
    pool_slot,
    num_slots,
    SILU: tl.constexpr,
    D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(slot_B + row).to(tl.int64)
    i_K = tl.arange(0, D)
    i_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    o_ptr_V = o_BHD + row * o_row + head * o_head + i_V
    if (slot < 0) | (slot >= num_slots):
        nothing_V = tl.zeros([BLOCK_V], dtype=tl.float32) + tl.where(slot < 0, 0.0, float("nan"))
        tl.store(o_ptr_V, nothing_V.to(o_BHD.dtype.element_ty))
        return
    # the long load first: the short ones arrive while it is under way
    s_ptr_KV = pool_SHDD + slot * pool_slot + head * (D * D) + (i_K[:, None] * D + i_V[None, :])
    s_KV = tl.load(s_ptr_KV)
    q_K = _activated(tl.load(q_BHD + row * q_row + head * q_head + i_K), SILU)
    k_K = _activated(tl.load(k_BHD + row * k_row + head * k_head + i_K), SILU)
    v_V = _activated(tl.load(v_BHD + row * v_row + head * v_head + i_V), SILU)
    s_KV = _decayed_plus(s_KV, tl.load(slope_H + head), k_K[:, None] * v_V[None, :])
    tl.store(s_ptr_KV, s_KV)
    tl.store(o_ptr_V, tl.sum(s_KV * q_K[:, None], axis=0).to(o_BHD.dtype.element_ty))


@triton.jit
def _activated(x, SILU: tl.constexpr):
    """fp32 of x or of SiLU(x); rounded to x's dtype between, so fused and unfused agree."""
    x_fp32 = x.to(tl.float32)
    if SILU:
        x_fp32 = (x_fp32 / (1.0 + tl.exp(-x_fp32))).to(x.dtype).to(tl.float32)
    return x_fp32


@triton.jit
def _decayed_plus(s, slope, added):
    """exp(-slope) * s + added.

    One fp32 factor is off by up to 3e-8, always to the same side: 6e-4 after 20,000 steps. So the
    factor is kept as a sum, whose small part is exact to fp32 in itself where decay is slow.
    """
    is_slow = slope < 0.25
    lost = slope * (1.0 - slope / 2 * (1.0 - slope / 3 * (1.0 - slope / 4 * (1.0 - slope / 5))))
    large = tl.where(is_slow, 1.0, tl.exp(-slope))
    small = tl.where(is_slow, -lost, 0.0)
    return tl.fma(s, large, tl.fma(s, small, added))
