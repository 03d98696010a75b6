"""The gated RMSNorm of `norm.py` in Triton: one token a program, in registers.

With r = 1 / sqrt(mean(x^2) + eps), n = r x, g = sigmoid(gate) and c = dy weight g:
dx = r (c - n mean(c n)), dgate = dy n weight g (1 - g), dweight = sum over tokens of dy n g.
Shapes: T tokens, I inner, P programs of the backward, each with a run of consecutive tokens.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202  (triton.jit reads the annotations of a kernel: constexpr only)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from m1serve.kernels.after_triton import pdl, release, wait

# sums of dweight: fixed, so that no machine adds them in another order
NUM_PARTIALS = 256


class GatedRMSNorm(torch.autograd.Function):
    """Inputs are taken as checked by `norm.gated_rms_norm`."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x_TI: Tensor, gate_TI: Tensor, weight_I: Tensor, eps: float
    ) -> Tensor:
        y_TI = torch.empty(x_TI.shape, dtype=x_TI.dtype, device=x_TI.device)
        r_T = torch.empty(len(x_TI), dtype=torch.float32, device=x_TI.device)
        ctx.save_for_backward(x_TI, gate_TI, weight_I, r_T)
        T, I = x_TI.shape  # noqa: E741
        if T:
            _forward[(T,)](
                *(x_TI, gate_TI, weight_I, y_TI, r_T),
                *(x_TI.stride(0), gate_TI.stride(0)),
                I,
                eps,
                **tiling(I, values_a_thread=32),
                **pdl(x_TI),
            )
        return y_TI

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy_TI: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, gate_TI, weight_I, r_T = ctx.saved_tensors  # type: ignore[attr-defined]
        T, I = x_TI.shape  # noqa: E741
        run = triton.cdiv(max(T, 1), NUM_PARTIALS)
        P = triton.cdiv(T, run)
        dy_TI = dy_TI.contiguous()
        dx_TI, dgate_TI = (
            torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x_TI, gate_TI)
        )
        dweight_PI = torch.empty((P, I), dtype=torch.float32, device=x_TI.device)
        if T:
            _backward[(P,)](
                *(dy_TI, x_TI, gate_TI, weight_I, r_T, dx_TI, dgate_TI, dweight_PI),
                *(x_TI.stride(0), gate_TI.stride(0)),
                *(T, I, run),
                **tiling(I, values_a_thread=8),
            )
        return dx_TI, dgate_TI, dweight_PI.sum(0).to(weight_I.dtype), None


def tiling(inner: int, *, values_a_thread: int) -> dict[str, int]:
    block_i = triton.next_power_of_2(inner)
    num_warps = min(max(block_i // (32 * values_a_thread), 4), 32)
    # said, because triton 3.9 warns where its default is taken
    return {"BLOCK_I": block_i, "num_warps": num_warps, "enable_fp_fusion": True}


@triton.jit
def _forward(
    x_TI,
    gate_TI,
    weight_I,
    y_TI,
    r_T,
    x_row,
    gate_row,
    num_inner,
    eps,
    BLOCK_I: tl.constexpr,
    WAIT: tl.constexpr,
):
    release(WAIT)
    wait(WAIT)
    t = tl.program_id(0).to(tl.int64)
    i_I = tl.arange(0, BLOCK_I)
    real_I = i_I < num_inner
    x_I = tl.load(x_TI + t * x_row + i_I, mask=real_I, other=0.0).to(tl.float32)
    gate_I = tl.load(gate_TI + t * gate_row + i_I, mask=real_I, other=0.0).to(tl.float32)
    w_I = tl.load(weight_I + i_I, mask=real_I, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x_I * x_I) / num_inner + eps)
    tl.store(r_T + t, r)
    y_I = x_I * r * w_I / (1.0 + tl.exp(-gate_I))
    tl.store(y_TI + t * num_inner + i_I, y_I.to(y_TI.dtype.element_ty), mask=real_I)


@triton.jit
def _backward(
    dy_TI,
    x_TI,
    gate_TI,
    weight_I,
    r_T,
    dx_TI,
    dgate_TI,
    dweight_PI,
    x_row,
    gate_row,
    num_tokens,
    num_inner,
    run,
    BLOCK_I: tl.constexpr,
):
    p = tl.program_id(0).to(tl.int64)
    i_I = tl.arange(0, BLOCK_I)
    real_I = i_I < num_inner
    w_I = tl.load(weight_I + i_I, mask=real_I, other=0.0).to(tl.float32)
    dweight_I = tl.zeros([BLOCK_I], dtype=tl.float32)
    for step in range(run):
        t = p * run + step
        if t < num_tokens:
            dy_I = tl.load(dy_TI + t * num_inner + i_I, mask=real_I, other=0.0).to(tl.float32)
            x_I = tl.load(x_TI + t * x_row + i_I, mask=real_I, other=0.0).to(tl.float32)
            gate_I = tl.load(gate_TI + t * gate_row + i_I, mask=real_I, other=0.0).to(tl.float32)
            r = tl.load(r_T + t)
            n_I = x_I * r
            g_I = 1.0 / (1.0 + tl.exp(-gate_I))
            dyg_I = dy_I * g_I
            c_I = dyg_I * w_I
            dx_I = r * (c_I - n_I * (tl.sum(c_I * n_I) / num_inner))
            dgate_I = c_I * n_I * (1.0 - g_I)
            dweight_I += dyg_I * n_I
            tl.store(dx_TI + t * num_inner + i_I, dx_I.to(dx_TI.dtype.element_ty), mask=real_I)
            tl.store(
                dgate_TI + t * num_inner + i_I, dgate_I.to(dgate_TI.dtype.element_ty), mask=real_I
            )
    tl.store(dweight_PI + p * num_inner + i_I, dweight_I, mask=real_I)
