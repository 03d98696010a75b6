"""What `logprobs` does to a chunk's logits between two matrix products, fused, fp32 inside.

Memory-bound: each kernel reads a chunk's fp32 logits once. Nothing is atomic: results repeat.
Shapes: T tokens, C columns of one chunk. A program's row t is one token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FOLD_BLOCK, FOLD_WARPS = 2048, 4
DIFFERENTIATE_BLOCK, DIFFERENTIATE_WARPS = 2048, 4


def fold_chunk(logits_TC: Tensor, running_4T: Tensor, target_T: Tensor, start: int) -> None:
    """`logprobs.Elementwise.fold_chunk`: fp32 logits of stride 1 along C, contiguous rest."""
    T, C = logits_TC.shape
    if T == 0:
        return
    with torch.cuda.device_of(logits_TC):  # type: ignore[no-untyped-call]
        logprobs_fold_kernel[(T,)](
            logits_TC,
            running_4T,
            target_T,
            start,
            C,
            logits_TC.stride(0),
            BLOCK_C=FOLD_BLOCK,
            num_warps=FOLD_WARPS,
        )


def differentiate_chunk(
    logits_TC: Tensor, rows_5T: Tensor, target_T: Tensor, start: int, out_TC: Tensor
) -> None:
    """`logprobs.Elementwise.differentiate_chunk`: fp32 logits, out in its own dtype."""
    T, C = logits_TC.shape
    if T == 0:
        return
    with torch.cuda.device_of(logits_TC):  # type: ignore[no-untyped-call]
        logprobs_differentiate_kernel[(T, triton.cdiv(C, DIFFERENTIATE_BLOCK))](
            logits_TC,
            rows_5T,
            target_T,
            out_TC,
            start,
            C,
            logits_TC.stride(0),
            out_TC.stride(0),
            BLOCK_C=DIFFERENTIATE_BLOCK,
            num_warps=DIFFERENTIATE_WARPS,
        )


@triton.jit  # type: ignore[untyped-decorator]
def logprobs_fold_kernel(
    logits: tl.tensor,
    running: tl.tensor,
    target: tl.tensor,
    start: int,
    num_columns: int,
    stride_row: int,
    BLOCK_C: tl.constexpr,
) -> None:
    t = tl.program_id(0).to(tl.int64)
    T = tl.num_programs(0).to(tl.int64)
    row = logits + t * stride_row
    c = tl.arange(0, BLOCK_C)
    # every lane keeps sums of its own: no reduction, so no barrier, until the row's end
    max_C = tl.full([BLOCK_C], -1e38, tl.float32)
    sum_C = tl.zeros([BLOCK_C], tl.float32)
    weighted_C = tl.zeros([BLOCK_C], tl.float32)
    for at in range(0, num_columns, BLOCK_C):
        logit_C = tl.load(row + at + c, mask=at + c < num_columns, other=-1e38)
        higher_C = tl.maximum(max_C, logit_C)
        shift_C = max_C - higher_C
        shrink_C = tl.exp(shift_C)
        gap_C = logit_C - higher_C
        e_C = tl.exp(gap_C)
        weighted_C = shrink_C * (weighted_C + shift_C * sum_C) + gap_C * e_C
        sum_C = shrink_C * sum_C + e_C
        max_C = higher_C

    before = tl.load(running + t)
    sum_before = tl.load(running + T + t)
    weighted_before = tl.load(running + 2 * T + t)
    higher = tl.maximum(before, tl.max(max_C, 0))
    shift_C = max_C - higher
    shrink_C = tl.exp(shift_C)
    shift = before - higher
    shrink = tl.exp(shift)
    total = shrink * sum_before + tl.sum(shrink_C * sum_C, 0)
    weighted_C = shrink_C * (weighted_C + shift_C * sum_C)
    weighted = shrink * (weighted_before + shift * sum_before) + tl.sum(weighted_C, 0)
    tl.store(running + t, higher)
    tl.store(running + T + t, total)
    tl.store(running + 2 * T + t, weighted)

    place = tl.load(target + t).to(tl.int64) - start
    is_here = (place >= 0) & (place < num_columns)
    picked = tl.load(row + place, mask=is_here, other=0.0)
    tl.store(running + 3 * T + t, picked, mask=is_here)


@triton.jit  # type: ignore[untyped-decorator]
def logprobs_differentiate_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    target: tl.tensor,
    out: tl.tensor,
    start: int,
    num_columns: int,
    stride_logits: int,
    stride_out: int,
    BLOCK_C: tl.constexpr,
) -> None:
    t = tl.program_id(0).to(tl.int64)
    T = tl.num_programs(0).to(tl.int64)
    highest = tl.load(rows + t)
    log_sum = tl.load(rows + T + t)
    entropy = tl.load(rows + 2 * T + t)
    by_logprob = tl.load(rows + 3 * T + t)
    by_entropy = tl.load(rows + 4 * T + t)
    place = tl.load(target + t).to(tl.int64) - start
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_real = c < num_columns
    logit_C = tl.load(logits + t * stride_logits + c, mask=is_real, other=0.0)
    logp_C = logit_C - highest - log_sum
    grad_C = -tl.exp(logp_C) * (by_logprob + by_entropy * (logp_C + entropy))
    grad_C += tl.where(c == place, by_logprob, 0.0)
    tl.store(out + t * stride_out + c, grad_C, mask=is_real)
