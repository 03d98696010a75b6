"""The experts of many tokens in torch: picks by expert, one product for all or one an expert.

Shapes: N tokens, E hidden, F ff of one expert, X experts, P experts per token. A pick is one
(token, expert) pair; M = N*P picks sorted by expert are the groups of a grouped matmul.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx, once_differentiable

from m1serve.kernels.residual import Picks, swiglu_weighted


class _Sorted(NamedTuple):
    """Picks by expert, equal ones in their order."""

    order_M: Tensor
    place_M: Tensor
    ends_X: Tensor


def _sort(chosen_NP: Tensor, num_experts: int) -> _Sorted:
    # a radix sort goes over one byte of a key and not over eight
    key_M = chosen_NP.flatten().to(torch.uint8 if num_experts <= 256 else torch.int64)
    expert_M, order_M = key_M.sort(stable=True)
    # bincount would wait for the device
    every_X = torch.arange(num_experts, device=expert_M.device)
    ends_X = torch.searchsorted(expert_M.long(), every_X, right=True, out_int32=True)
    every_M = torch.arange(order_M.numel(), device=order_M.device)
    return _Sorted(order_M, torch.empty_like(order_M).scatter_(0, order_M, every_M), ends_X)


class _GroupedPicks(NamedTuple):
    y_ME: Tensor
    place_M: Tensor
    h_M2F: Tensor
    weight_M1: Tensor
    order_M: Tensor
    ends_X: Tensor


def grouped_picks(
    x_NE: Tensor, w13_X2FE: Tensor, w2_XEF: Tensor, weight_NP: Tensor, chosen_NP: Tensor
) -> _GroupedPicks:
    """All experts in one grouped matmul a projection, picks sorted by expert."""
    order_M, place_M, ends_X = _sort(chosen_NP, len(w2_XEF))
    x_ME = x_NE.index_select(0, order_M // chosen_NP.shape[1])
    h_M2F = F.grouped_mm(x_ME, w13_X2FE.transpose(1, 2), offs=ends_X)
    del x_ME
    weight_M1 = weight_NP.flatten().index_select(0, order_M).unsqueeze(1)
    z_MF = swiglu_weighted(h_M2F, weight_M1)
    y_ME = F.grouped_mm(z_MF, w2_XEF.transpose(1, 2), offs=ends_X)
    return _GroupedPicks(y_ME, place_M, h_M2F, weight_M1, order_M, ends_X)


@torch.no_grad()
def looped_picks(
    x_NE: Tensor, w13_X2FE: Tensor, w2_XEF: Tensor, weight_NP: Tensor, chosen_NP: Tensor
) -> Picks:
    """One expert after the other; waits once for the device, to know how many picks each has."""
    order_M, place_M, ends_X = _sort(chosen_NP, len(w2_XEF))
    y_ME = x_NE.new_empty(order_M.numel(), x_NE.shape[1])
    token_M = order_M // chosen_NP.shape[1]
    weight_M1 = weight_NP.flatten().index_select(0, order_M).unsqueeze(1)
    start = 0
    for end, w13_2FE, w2_EF in zip(ends_X.tolist(), w13_X2FE, w2_XEF, strict=True):
        if end > start:
            h_M2F = F.linear(x_NE.index_select(0, token_M[start:end]), w13_2FE)
            z_MF = swiglu_weighted(h_M2F, weight_M1[start:end])
            torch.mm(z_MF, w2_EF.t(), out=y_ME[start:end])
        start = end
    return Picks(y_ME, place_M, chosen_NP.shape[1])


class Grouped(torch.autograd.Function):
    """All experts in one grouped matmul a projection; keeps x and h, and computes the rest again.

    Gathers go both ways through the sort's permutation, so no gradient is summed by atomics.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x_NE: Tensor,
        w13_X2FE: Tensor,
        w2_XEF: Tensor,
        weight_NP: Tensor,
        chosen_NP: Tensor,
    ) -> Tensor:
        y_ME, place_M, h_M2F, weight_M1, order_M, ends_X = grouped_picks(
            x_NE, w13_X2FE, w2_XEF, weight_NP, chosen_NP
        )
        ctx.save_for_backward(x_NE, w13_X2FE, w2_XEF, h_M2F, weight_M1, order_M, place_M, ends_X)
        return Picks(y_ME, place_M, chosen_NP.shape[1]).total()

    @staticmethod
    @once_differentiable
    def backward(ctx: BackwardCFunction, dout_NE: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        x_NE, w13_X2FE, w2_XEF, h_M2F, weight_M1, order_M, place_M, ends_X = saved
        wanted: tuple[bool, ...] = ctx.needs_input_grad
        wants_x, wants_w13, wants_w2, wants_weight, _ = wanted
        P = order_M.numel() // x_NE.shape[0]
        token_M = order_M // P
        dx_NE = dw13_X2FE = dw2_XEF = dweight_NP = None
        a_MF, b_MF = h_M2F.chunk(2, -1)
        silu_MF = F.silu(a_MF)
        inner_MF = silu_MF * b_MF
        dout_ME = dout_NE.index_select(0, token_M)
        # the gradient of weight * inner
        dz_MF = F.grouped_mm(dout_ME, w2_XEF, offs=ends_X)
        if wants_weight:
            dweight_M = (dz_MF * inner_MF).sum(-1, dtype=torch.float32).index_select(0, place_M)
            dweight_NP = dweight_M.view(-1, P).to(weight_M1.dtype)
        if wants_w2:
            dw2_XEF = F.grouped_mm(dout_ME.t(), inner_MF.mul_(weight_M1), offs=ends_X)
        del inner_MF, dout_ME
        dh_M2F = _swiglu_backward(dz_MF.mul_(weight_M1), a_MF, b_MF, silu_MF)
        del dz_MF, silu_MF
        if wants_w13:
            x_ME = x_NE.index_select(0, token_M)
            dw13_X2FE = F.grouped_mm(dh_M2F.t(), x_ME, offs=ends_X)
        if wants_x:
            dx_ME = F.grouped_mm(dh_M2F, w13_X2FE, offs=ends_X)
            dx_NE = Picks(dx_ME, place_M, P).total()
        return dx_NE, dw13_X2FE, dw2_XEF, dweight_NP, None


def _swiglu_backward(dinner_MF: Tensor, a_MF: Tensor, b_MF: Tensor, silu_MF: Tensor) -> Tensor:
    """The gradient [M, 2F] of silu(a) * b; overwrites `dinner_MF`."""
    num_picks, num_inner = dinner_MF.shape
    dh_M2F = dinner_MF.new_empty(num_picks, 2 * num_inner)
    da_MF, db_MF = dh_M2F.chunk(2, -1)
    torch.mul(dinner_MF, silu_MF, out=db_MF)
    torch.ops.aten.silu_backward(dinner_MF.mul_(b_MF), a_MF, grad_input=da_MF)
    return dh_M2F
