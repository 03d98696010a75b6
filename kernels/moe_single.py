"""The experts of one token in Triton: each program finds its expert in the router's logits itself.

As `moe_decode`, whose choice would be a launch of its own. Inputs are taken as checked
(`moe.routed_experts`). Shapes: E hidden, F ff of one expert, X experts, P chosen ones, each a slot
of the grid; tile columns B, of which the first is the token; R weight rows of a program.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202  (a jit kernel's annotations are constexpr only)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from m1serve.kernels.after_triton import bring_to_l2, pdl, release, wait
from m1serve.kernels.linear_triton import AHEAD, LINE, product
from m1serve.kernels.moe_decode import gated, tile_of
from m1serve.kernels.router_triton import chosen_of


def one_token_picks(
    x_1E: Tensor, w13_X2FE: Tensor, w2_XEF: Tensor, logits_1X: Tensor, num_chosen: int
) -> Tensor:
    """weight * w2 (silu(w1 x) * w3 x), [P, E] in x's dtype, of the P most probable experts.

    The bits of `router_triton.choose` and `moe_decode.expert_picks`, but for the sums' tile.
    """
    x_1E, logits_1X = x_1E.contiguous(), logits_1X.contiguous()
    E, X, ff = x_1E.shape[1], len(w2_XEF), w2_XEF.shape[2]
    z_PF, y_PE = x_1E.new_empty(num_chosen, ff), x_1E.new_empty(num_chosen, E)
    tile = tile_of(1)
    shared = {
        "P": num_chosen,
        "BLOCK_P": triton.next_power_of_2(num_chosen),
        "BLOCK_X": triton.next_power_of_2(X),
        **tile.options,
        **pdl(x_1E),
    }
    with torch.cuda.device_of(x_1E):
        up_one_kernel[(triton.cdiv(ff, tile.rows // 2), num_chosen)](
            *(x_1E, w13_X2FE, logits_1X, z_PF, X, E, ff),
            EVEN=E % tile.depth == 0,
            **shared,
        )
        down_one_kernel[(triton.cdiv(E, tile.rows), num_chosen)](
            *(z_PF, w2_XEF, logits_1X, y_PE, X, ff, E),
            AHEAD=AHEAD // tile.rows,
            EVEN=ff % tile.depth == 0,
            **shared,
        )
    return y_PE


@triton.jit
def up_one_kernel(
    x_1E,
    w13_X2FE,
    logits_1X,
    z_PF,
    num_experts,
    num_hidden,
    num_inner,
    EVEN: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    WAIT: tl.constexpr,
):
    wait(WAIT)
    # not before: the next kernel reads the logits without a wait of its own
    release(WAIT)
    expert, weight = _routed(logits_1X, num_experts, P, BLOCK_P, BLOCK_X)
    HALF: tl.constexpr = ROWS // 2
    i_R = tl.arange(0, ROWS)
    inner_R = tl.minimum(tl.program_id(0) * HALF + i_R % HALF, num_inner - 1)
    row_R = inner_R + tl.where(i_R < HALF, 0, num_inner)
    w_ptr_R = w13_X2FE + (expert * (2 * num_inner) + row_R) * num_hidden
    i_F = tl.program_id(0) * HALF + tl.arange(0, HALF)
    i_B = tl.arange(0, BLOCK_B)
    sum_RB = product(w_ptr_R, x_1E + i_B * 0, i_B == 0, num_hidden, ROWS, BLOCK_B, DEPTH, EVEN)
    a_FB, b_FB = tl.split(tl.permute(tl.reshape(sum_RB, (2, HALF, BLOCK_B)), (1, 2, 0)))
    z_FB = gated(a_FB, b_FB, weight, z_PF.dtype.element_ty)
    z_ptr_FB = z_PF + tl.program_id(1) * num_inner + i_F[:, None] + i_B[None, :] * 0
    tl.store(z_ptr_FB, z_FB, mask=(i_B == 0)[None, :] & (i_F < num_inner)[:, None])


@triton.jit
def down_one_kernel(
    z_PF,
    w2_XEF,
    logits_1X,
    y_PE,
    num_experts,
    num_inner,
    num_hidden,
    AHEAD: tl.constexpr,
    EVEN: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    WAIT: tl.constexpr,
):
    # `up_one_kernel` let this one start only when the logits were done
    expert, _ = _routed(logits_1X, num_experts, P, BLOCK_P, BLOCK_X)
    i_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_R = tl.minimum(i_R, num_hidden - 1)
    w_ptr_R = w2_XEF + (expert * num_hidden + row_R) * num_inner
    if WAIT:
        at_L = tl.minimum(tl.arange(0, AHEAD) * LINE, num_inner - 1)
        bring_to_l2(w_ptr_R[:, None] + at_L[None, :])
    release(WAIT)
    wait(WAIT)
    i_B = tl.arange(0, BLOCK_B)
    z_ptr_B = z_PF + tl.program_id(1) * num_inner + i_B * 0
    y_RB = product(w_ptr_R, z_ptr_B, i_B == 0, num_inner, ROWS, BLOCK_B, DEPTH, EVEN)
    y_ptr_RB = y_PE + tl.program_id(1) * num_hidden + i_R[:, None] + i_B[None, :] * 0
    y_RB = y_RB.to(y_PE.dtype.element_ty)
    tl.store(y_ptr_RB, y_RB, mask=(i_B == 0)[None, :] & (i_R < num_hidden)[:, None])


@triton.jit
def _routed(logits_1X, num_experts, P: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_X: tl.constexpr):
    """The expert (int64) of the program's slot, and its weight."""
    i_X, i_P = tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_P)
    real_X = i_X < num_experts
    logit_X = tl.load(logits_1X + i_X, mask=real_X, other=float("-inf"))
    weight_P, chosen_P, _ = chosen_of(logit_X, i_X, real_X, i_P, P, BLOCK_X)
    is_mine_P = i_P == tl.program_id(1)
    expert = tl.sum(tl.where(is_mine_P, chosen_P, 0), 0).to(tl.int64)
    return expert, tl.sum(tl.where(is_mine_P, weight_P, 0.0), 0)
