"""Few tokens times a weight in Triton: a program owns some of the weight's rows, read once.

Inputs are taken as checked (`linear`). Shapes: N tokens, of which tile column B is one, E in,
O out; R weight rows of a program, K of the dimension that is summed.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201  (a jit kernel's annotations are constexpr only)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from m1serve.kernels.after_triton import after, pdl

SHARED_BYTES = 104 << 10
"""Of a program: two of them fit a multiprocessor."""
MAX_STAGES = 7


def multiply(x: Tensor, weight_OE: Tensor, dtype: torch.dtype) -> Tensor:
    """x weightᵀ, [..., O] in `dtype`: fp32 sums, in an order that the weight's shape alone sets."""
    O, E = weight_OE.shape  # noqa: E741
    x_NE = x.reshape(-1, E).contiguous()
    N = x_NE.shape[0]
    out_NO = torch.empty(N, O, dtype=dtype, device=x.device)
    options = tiling(N, O)
    grid = (triton.cdiv(O, options["ROWS"]), triton.cdiv(N, options["BLOCK_B"]))
    with torch.cuda.device_of(x):
        linear_kernel[grid](
            *(x_NE, weight_OE, out_NO),
            *(N, E, O),
            EVEN=E % options["DEPTH"] == 0,
            **options,
            **pdl(x),
        )
    return out_NO.view(*x.shape[:-1], O)


def tiling(num_tokens: int, num_rows: int) -> dict[str, int | bool]:
    """Programs enough for a Hopper GPU's 132 multiprocessors, each with long reads under way."""
    rows, depth = (64, 128) if num_rows > 16384 else (32, 256) if num_rows > 4096 else (16, 256)
    block_b = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    # triton keeps a stage less in shared memory where the tile is too low for wgmma
    more = 0 if rows >= 64 else 1
    num_stages = SHARED_BYTES // ((rows + block_b) * depth * 2) + more
    return {
        "BLOCK_B": block_b,
        "ROWS": rows,
        "DEPTH": depth,
        "num_warps": 4,
        "num_stages": min(MAX_STAGES, num_stages),
        # said, because triton 3.9 warns where its default is taken
        "enable_fp_fusion": True,
    }


@triton.jit
def linear_kernel(
    x_NE,
    w_OE,
    out_NO,
    num_tokens,
    num_in,
    num_out,
    EVEN: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    WAIT: tl.constexpr,
):
    after(WAIT)
    i_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n_B = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    real_B = n_B < num_tokens
    w_ptr_R = w_OE + tl.minimum(i_R, num_out - 1).to(tl.int64) * num_in
    out_RB = product(w_ptr_R, x_NE + n_B * num_in, real_B, num_in, ROWS, BLOCK_B, DEPTH, EVEN)
    out_ptr_RB = out_NO + n_B[None, :].to(tl.int64) * num_out + i_R[:, None]
    out_RB = out_RB.to(out_NO.dtype.element_ty)
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
