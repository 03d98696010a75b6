"""The experts of few tokens in Triton: each weight of a chosen expert is read once, others never.

A program owns some rows of one expert's weights and multiplies them with all tokens that chose it,
which it finds itself among the picks: no sort, no host wait, a grid from shapes alone.
Inputs are taken as checked (`moe.grouped_experts`); importing this module imports triton.
Shapes: N tokens, E hidden, F ff of one expert, X experts, P experts a token, M = N*P picks, of
which tile column B is one; R weight rows of a program, K of the dimension that is summed.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202  (a jit kernel's annotations are constexpr only)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from m1serve.kernels.after_triton import bring_to_l2, pdl, release, wait
from m1serve.kernels.linear_triton import AHEAD, LINE, Tile, product

MAX_PICKS = 512
CHUNK = 64
"""Picks that a program looks through at a time for its own."""


def expert_picks(
    x_NE: Tensor,
    w13_X2FE: Tensor,
    w2_XEF: Tensor,
    weight_NP: Tensor,
    chosen_NP: Tensor,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """weight * w2 (silu(w1 x) * w3 x) of every pick, [N*P, E] in x's dtype, row n*P + p.

    Rounded where `moe.Grouped` rounds. No sum depends on timing, and none crosses tokens: a
    token's bits depend on the others through their number alone, which picks the tile's width.
    An expert outside [0, X) is not read; its pick's row is then whatever memory held.
    """
    (N, E), (X, _, ff), M = x_NE.shape, w2_XEF.shape, chosen_NP.numel()
    x_NE, weight_NP, chosen_NP = x_NE.contiguous(), weight_NP.contiguous(), chosen_NP.contiguous()
    z_MF = x_NE.new_empty(M, ff)
    y_ME = x_NE.new_empty(M, E)
    tile = tile or tile_of(N)
    shared = {
        "BY_PICK": M <= X,
        "BLOCK_M": triton.next_power_of_2(M),
        "CHUNK": CHUNK,
        **tile.options,
        **pdl(x_NE),
    }
    up_kernel[(triton.cdiv(ff, tile.rows // 2), min(M, X))](
        *(x_NE, w13_X2FE, weight_NP, chosen_NP, z_MF),
        *(M, X, E, ff, chosen_NP.shape[1]),
        EVEN=E % tile.depth == 0,
        **shared,
    )
    down_kernel[(triton.cdiv(E, tile.rows), min(M, X))](
        *(z_MF, w2_XEF, chosen_NP, y_ME),
        *(M, X, ff, E),
        AHEAD=AHEAD // tile.rows,
        EVEN=ff % tile.depth == 0,
        **shared,
    )
    return y_ME


def tile_of(num_tokens: int) -> Tile:
    """As wide as most experts' tokens; the loads in flight fill what two programs may use.

    An expert with more tokens reads its weights once more for each further tile.
    """
    tokens, num_stages = (16, 5) if num_tokens <= 48 else (32, 4) if num_tokens <= 128 else (64, 3)
    return Tile(rows=64, depth=128, tokens=tokens, num_stages=num_stages)


@triton.jit
def up_kernel(
    x_NE,
    w13_X2FE,
    weight_M,
    chosen_M,
    z_MF,
    num_picks,
    num_experts,
    num_hidden,
    num_inner,
    num_chosen,
    EVEN: tl.constexpr,
    BY_PICK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
    WAIT: tl.constexpr,
):
    """z = weight * silu(w1 x) * w3 x; a program's first rows are of w1, the others of w3."""
    wait(WAIT)
    # not before: the next kernel reads the choice without a wait of its own
    release(WAIT)
    expert, count = _slot(chosen_M, num_picks, num_experts, BY_PICK, BLOCK_M)
    HALF: tl.constexpr = ROWS // 2
    i_R = tl.arange(0, ROWS)
    inner_R = tl.minimum(tl.program_id(0) * HALF + i_R % HALF, num_inner - 1)
    row_R = inner_R + tl.where(i_R < HALF, 0, num_inner)
    w_ptr_R = w13_X2FE + (expert * (2 * num_inner) + row_R) * num_hidden
    i_F = tl.program_id(0) * HALF + tl.arange(0, HALF)
    for start in range(0, count, BLOCK_B):
        pick_B, real_B = _tile(chosen_M, num_picks, expert, start, count, BLOCK_B, CHUNK)
        x_ptr_B = x_NE + (pick_B // num_chosen).to(tl.int64) * num_hidden
        sum_RB = product(w_ptr_R, x_ptr_B, real_B, num_hidden, ROWS, BLOCK_B, DEPTH, EVEN)
        both_FB2 = tl.permute(tl.reshape(sum_RB, (2, HALF, BLOCK_B)), (1, 2, 0))
        a_FB, b_FB = tl.split(both_FB2)
        weight_B = tl.load(weight_M + pick_B, mask=real_B, other=0.0).to(tl.float32)
        z_FB = gated(a_FB, b_FB, weight_B[None, :], z_MF.dtype.element_ty)
        z_ptr_FB = z_MF + pick_B[None, :].to(tl.int64) * num_inner + i_F[:, None]
        tl.store(z_ptr_FB, z_FB, mask=real_B[None, :] & (i_F < num_inner)[:, None])


@triton.jit
def down_kernel(
    z_MF,
    w2_XEF,
    chosen_M,
    y_ME,
    num_picks,
    num_experts,
    num_inner,
    num_hidden,
    AHEAD: tl.constexpr,
    EVEN: tl.constexpr,
    BY_PICK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
    WAIT: tl.constexpr,
):
    """y = w2 z of each pick."""
    expert, count = _slot(chosen_M, num_picks, num_experts, BY_PICK, BLOCK_M)
    i_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_R = tl.minimum(i_R, num_hidden - 1)
    w_ptr_R = w2_XEF + (expert * num_hidden + row_R) * num_inner
    # the weights' first columns come while `up_kernel` ends
    if WAIT and count > 0:
        at_L = tl.minimum(tl.arange(0, AHEAD) * LINE, num_inner - 1)
        bring_to_l2(w_ptr_R[:, None] + at_L[None, :])
    release(WAIT)
    wait(WAIT)
    for start in range(0, count, BLOCK_B):
        pick_B, real_B = _tile(chosen_M, num_picks, expert, start, count, BLOCK_B, CHUNK)
        z_ptr_B = z_MF + pick_B.to(tl.int64) * num_inner
        y_RB = product(w_ptr_R, z_ptr_B, real_B, num_inner, ROWS, BLOCK_B, DEPTH, EVEN)
        y_ptr_RB = y_ME + pick_B[None, :].to(tl.int64) * num_hidden + i_R[:, None]
        y_RB = y_RB.to(y_ME.dtype.element_ty)
        tl.store(y_ptr_RB, y_RB, mask=real_B[None, :] & (i_R < num_hidden)[:, None])


@triton.jit
def gated(a, b, weight, DTYPE: tl.constexpr):
    """silu(a) * b * weight, rounded to DTYPE where torch rounds between its kernels."""
    a = a.to(DTYPE).to(tl.float32)
    b = b.to(DTYPE).to(tl.float32)
    silu = (a / (1.0 + tl.exp(-a))).to(DTYPE).to(tl.float32)
    return ((silu * b).to(DTYPE).to(tl.float32) * weight).to(DTYPE)


@triton.jit
def _slot(chosen_M, num_picks, num_experts, BY_PICK: tl.constexpr, BLOCK_M: tl.constexpr):
    """The program's expert (int64) and how many picks are its own: 0 where another program's.

    With fewer picks than experts a slot is a pick, and the first of an expert's picks owns them.
    """
    slot = tl.program_id(1)
    m_M = tl.arange(0, BLOCK_M)
    expert_M = tl.load(chosen_M + m_M, mask=m_M < num_picks, other=-1)
    expert = slot.to(tl.int64)
    if BY_PICK:
        expert = tl.load(chosen_M + slot).to(tl.int64)
    is_mine_M = expert_M == expert
    count = tl.sum(is_mine_M.to(tl.int32), 0)
    if BY_PICK:
        first = tl.min(tl.where(is_mine_M, m_M, BLOCK_M), 0)
        count = tl.where(first == slot, count, 0)
    count = tl.where((expert >= 0) & (expert < num_experts), count, 0)
    return expert, count


@triton.jit
def _tile(chosen_M, num_picks, expert, start, count, BLOCK_B: tl.constexpr, CHUNK: tl.constexpr):
    """The expert's picks `start` to `start + BLOCK_B`, in order, and which of them exist."""
    i_B = tl.arange(0, BLOCK_B)
    pick_B = tl.zeros([BLOCK_B], dtype=tl.int32)
    seen = 0 - start
    for at in range(0, num_picks, CHUNK):
        m_C = at + tl.arange(0, CHUNK)
        is_mine_C = tl.load(chosen_M + m_C, mask=m_C < num_picks, other=-1) == expert
        place_C = seen + tl.cumsum(is_mine_C.to(tl.int32), 0) - 1
        is_it_BC = is_mine_C[None, :] & (place_C[None, :] == i_B[:, None])
        pick_B += tl.sum(tl.where(is_it_BC, m_C[None, :], 0), 1)
        seen += tl.sum(is_mine_C.to(tl.int32), 0)
    return pick_B, i_B < count - start
