"""Few tokens times weights in Triton: a program owns some of one weight's rows, read once.

A program asks for its rows' first columns before it waits for the tokens: the memory works while
the kernels before, which are small, end. Inputs are taken as checked (`linear`).
Shapes: N tokens, of which tile column B is one, E in, O out; R weight rows of a program, K of the
dimension that is summed, L lines of 128 bytes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201  (a jit kernel's annotations are constexpr only)
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from m1serve.kernels.after_triton import bring_to_l2, pdl, release, wait

SHARED_BYTES = 104 << 10
"""Of a program: two of them fit a multiprocessor."""
MAX_STAGES = 7
MAX_WEIGHTS = 3
LINE: tl.constexpr = tl.constexpr(64)
"""Values of bf16 in a line of L2."""
AHEAD = 1024
"""Lines that a program asks for before its wait: a third of L2 for as many as may run at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What a program multiplies at a time, and how many such are on their way to it."""

    rows: int
    depth: int
    tokens: int
    num_stages: int

    @property
    def options(self) -> dict[str, int | bool]:
        """Constexprs and launch options."""
        return {
            "BLOCK_B": self.tokens,
            "ROWS": self.rows,
            "DEPTH": self.depth,
            "num_warps": 4,
            "num_stages": self.num_stages,
            # said, because triton 3.9 warns where its default is taken
            "enable_fp_fusion": True,
        }


def multiply(
    x: Tensor, weights: Sequence[Tensor], dtype: torch.dtype, *, tile: Tile | None = None
) -> list[Tensor]:
    """x weightᵀ of each of up to MAX_WEIGHTS, [..., O] in `dtype`, in one launch.

    fp32 sums, in an order that the weights' shapes alone set.
    """
    E = weights[0].shape[1]
    x_NE = x.reshape(-1, E).contiguous()
    N = x_NE.shape[0]
    out = [torch.empty(N, len(w), dtype=dtype, device=x.device) for w in weights]
    tile = tile or tile_of(N, sum(len(w) for w in weights))
    num_absent = MAX_WEIGHTS - len(weights)
    num_tiles = [triton.cdiv(len(w), tile.rows) for w in weights]
    with torch.cuda.device_of(x):
        linear_kernel[(sum(num_tiles), triton.cdiv(N, tile.tokens))](
            x_NE,
            *weights,
            *[None] * num_absent,
            *out,
            *[None] * num_absent,
            *[len(w) for w in weights],
            *[0] * num_absent,
            *(N, E),
            COUNT=len(weights),
            AHEAD=AHEAD // tile.rows,
            EVEN=E % tile.depth == 0,
            **tile.options,
            **pdl(x),
        )
    return [t.view(*x.shape[:-1], t.shape[1]) for t in out]


def tile_of(num_tokens: int, num_rows: int) -> Tile:
    """Programs enough for a Hopper GPU's 132 multiprocessors, each with long reads under way."""
    rows, depth = (64, 128) if num_rows > 16384 else (32, 256) if num_rows > 4096 else (16, 256)
    tokens = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    # triton keeps a stage less in shared memory where the tile is too low for wgmma
    more = 0 if rows >= 64 else 1
    num_stages = SHARED_BYTES // ((rows + tokens) * depth * 2) + more
    return Tile(rows=rows, depth=depth, tokens=tokens, num_stages=min(MAX_STAGES, num_stages))


@triton.jit
def linear_kernel(
    x_NE,
    w0_OE,
    w1_OE,
    w2_OE,
    out0_NO,
    out1_NO,
    out2_NO,
    num_out0,
    num_out1,
    num_out2,
    num_tokens,
    num_in,
    COUNT: tl.constexpr,
    AHEAD: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    WAIT: tl.constexpr,
):
    """The weights' tiles one after another; AHEAD lines of each row are asked for early."""
    release(WAIT)
    tile = tl.program_id(0)
    w_OE, out_NO, num_out = w0_OE, out0_NO, num_out0
    end = tl.cdiv(num_out0, ROWS)
    if COUNT > 1:
        is_next = tile >= end
        tile -= tl.where(is_next, end, 0)
        w_OE = tl.where(is_next, w1_OE, w_OE)
        out_NO = tl.where(is_next, out1_NO, out_NO)
        num_out = tl.where(is_next, num_out1, num_out)
    if COUNT > 2:
        end = tl.cdiv(num_out1, ROWS)
        is_last = is_next & (tile >= end)
        tile -= tl.where(is_last, end, 0)
        w_OE = tl.where(is_last, w2_OE, w_OE)
        out_NO = tl.where(is_last, out2_NO, out_NO)
        num_out = tl.where(is_last, num_out2, num_out)
    i_R = tile * ROWS + tl.arange(0, ROWS)
    n_B = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    real_B = n_B < num_tokens
    w_ptr_R = w_OE + tl.minimum(i_R, num_out - 1).to(tl.int64) * num_in
    if WAIT:
        at_L = tl.minimum(tl.arange(0, AHEAD) * LINE, num_in - 1)
        bring_to_l2(w_ptr_R[:, None] + at_L[None, :])
    wait(WAIT)
    out_RB = product(w_ptr_R, x_NE + n_B * num_in, real_B, num_in, ROWS, BLOCK_B, DEPTH, EVEN)
    out_ptr_RB = out_NO + n_B[None, :].to(tl.int64) * num_out + i_R[:, None]
    out_RB = out_RB.to(out0_NO.dtype.element_ty)
    tl.store(out_ptr_RB, out_RB, mask=real_B[None, :] & (i_R < num_out)[:, None])


@triton.jit
def product(
    w_ptr_R,
    x_ptr_B,
    real_B,
    num_summed,
    ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The fp32 sums w x, [R, B], of rows that start at the pointers; B's that are not real are 0.

    The weights come first in the product: their rows fill a tensor core's tile, tokens cannot.
    """
    i_K = tl.arange(0, DEPTH)
    sum_RB = tl.zeros([ROWS, BLOCK_B], dtype=tl.float32)
    for start in range(0, num_summed, DEPTH):
        k_K = start + i_K
        if EVEN:
            w_RK = tl.load(w_ptr_R[:, None] + k_K[None, :])
            x_BK = tl.load(x_ptr_B[:, None] + k_K[None, :], mask=real_B[:, None], other=0.0)
        else:
            in_K = k_K < num_summed
            w_RK = tl.load(w_ptr_R[:, None] + k_K[None, :], mask=in_K[None, :], other=0.0)
            real_BK = real_B[:, None] & in_K[None, :]
            x_BK = tl.load(x_ptr_B[:, None] + k_K[None, :], mask=real_BK, other=0.0)
        sum_RB = tl.dot(w_RK, tl.trans(x_BK), sum_RB, input_precision="ieee")
    return sum_RB
