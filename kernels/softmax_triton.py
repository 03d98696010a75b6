"""Joins attention to some keys with attention to others, in one pass in Triton, fp32 inside.

Shapes: T tokens, H heads, D head dim; BLOCK_T tokens of a head are a program's.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201  (a jit kernel's annotations are constexpr only)
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from m1serve.kernels.after_triton import pdl, release, wait

if TYPE_CHECKING:
    from m1serve.kernels.softmax import Part

BLOCK_T = 16


def join_(into: Part, other: Part) -> None:
    """`into` becomes attention to the keys of both; a part of no keys has a log-sum-exp of -inf."""
    T, H, D = into.o_THD.shape
    with torch.cuda.device_of(into.o_THD):
        join_parts_kernel[(triton.cdiv(T, BLOCK_T), H)](
            *(into.o_THD, other.o_THD, into.lse_HT, other.lse_HT, T),
            *into.o_THD.stride()[:2],
            *other.o_THD.stride()[:2],
            *into.lse_HT.stride(),
            *other.lse_HT.stride(),
            D=D,
            BLOCK_D=triton.next_power_of_2(D),
            BLOCK_T=BLOCK_T,
            num_warps=4,
            # said, because triton 3.9 warns where its default is taken
            enable_fp_fusion=True,
            **pdl(into.o_THD),
        )


@triton.jit
def join_parts_kernel(
    a_THD,
    b_THD,
    a_lse_HT,
    b_lse_HT,
    num_tokens,
    a_row,
    a_head,
    b_row,
    b_head,
    a_lse_head,
    a_lse_row,
    b_lse_head,
    b_lse_row,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WAIT: tl.constexpr,
):
    release(WAIT)
    wait(WAIT)
    head = tl.program_id(1).to(tl.int64)
    i_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    i_D = tl.arange(0, BLOCK_D)
    real_T = i_T < num_tokens
    real_TD = real_T[:, None] & (i_D < D)[None, :]
    a_lse_ptr_T = a_lse_HT + head * a_lse_head + i_T * a_lse_row
    a_T = tl.load(a_lse_ptr_T, mask=real_T, other=0.0)
    b_T = tl.load(b_lse_HT + head * b_lse_head + i_T * b_lse_row, mask=real_T, other=0.0)
    most_T = tl.maximum(a_T, b_T)
    weight_a_T, weight_b_T = tl.exp(a_T - most_T), tl.exp(b_T - most_T)
    total_T = weight_a_T + weight_b_T
    a_ptr_TD = a_THD + head * a_head + i_T[:, None] * a_row + i_D[None, :]
    b_ptr_TD = b_THD + head * b_head + i_T[:, None] * b_row + i_D[None, :]
    a_TD = tl.load(a_ptr_TD, mask=real_TD, other=0.0).to(tl.float32)
    b_TD = tl.load(b_ptr_TD, mask=real_TD, other=0.0).to(tl.float32)
    o_TD = a_TD * (weight_a_T / total_T)[:, None] + b_TD * (weight_b_T / total_T)[:, None]
    tl.store(a_ptr_TD, o_TD.to(a_THD.dtype.element_ty), mask=real_TD)
    tl.store(a_lse_ptr_T, most_T + tl.log(total_T), mask=real_T)
