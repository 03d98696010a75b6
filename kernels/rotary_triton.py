"""Rotary positions of `rotary.py` in Triton: a token's queries and keys a program, one launch.

Shapes: N = B*T tokens, H query heads, K kv heads, D head dim, R rotary pairs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202  (a jit kernel's annotations are constexpr only)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from m1serve.kernels.after_triton import pdl, release, wait


def rotate_in_place(q_BTHD: Tensor, k_BTKD: Tensor, cos_bTR: Tensor, sin_bTR: Tensor) -> None:
    """`rotary.rotate_` of checked inputs."""
    (B, T, H, _), K, R = q_BTHD.shape, k_BTKD.shape[2], cos_bTR.shape[-1]
    if not B * T:
        return
    with torch.cuda.device_of(q_BTHD):
        rotary_kernel[(B * T,)](
            *(q_BTHD, k_BTKD, cos_bTR, sin_bTR),
            *(q_BTHD.stride(1) if T > 1 else q_BTHD.stride(0), q_BTHD.stride(2)),
            *(k_BTKD.stride(1) if T > 1 else k_BTKD.stride(0), k_BTKD.stride(2)),
            *(H, K, R, cos_bTR.shape[0] * T),
            BLOCK_H=triton.next_power_of_2(H),
            BLOCK_K=triton.next_power_of_2(K),
            BLOCK_R=triton.next_power_of_2(R),
            num_warps=4,
            # said, because triton 3.9 warns where its default is taken
            enable_fp_fusion=True,
            **pdl(q_BTHD),
        )


@triton.jit
def rotary_kernel(
    q_NHD,
    k_NKD,
    cos_NR,
    sin_NR,
    q_row,
    q_head,
    k_row,
    k_head,
    num_heads,
    num_kv_heads,
    num_pairs,
    num_positions,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WAIT: tl.constexpr,
):
    release(WAIT)
    wait(WAIT)
    n = tl.program_id(0).to(tl.int64)
    i_R = tl.arange(0, BLOCK_R)
    real_R = i_R < num_pairs
    at_R = (n % num_positions) * num_pairs + i_R
    cos_R = tl.load(cos_NR + at_R, mask=real_R, other=0.0).to(tl.float32)
    sin_R = tl.load(sin_NR + at_R, mask=real_R, other=0.0).to(tl.float32)
    _turn(q_NHD + n * q_row, q_head, num_heads, num_pairs, cos_R, sin_R, BLOCK_H, BLOCK_R)
    _turn(k_NKD + n * k_row, k_head, num_kv_heads, num_pairs, cos_R, sin_R, BLOCK_K, BLOCK_R)


@triton.jit
def _turn(
    x_HD,
    head_stride,
    num_heads,
    num_pairs,
    cos_R,
    sin_R,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    i_H = tl.arange(0, BLOCK_H)
    i_R = tl.arange(0, BLOCK_R)
    real_HR = (i_H < num_heads)[:, None] & (i_R < num_pairs)[None, :]
    a_ptr_HR = x_HD + i_H[:, None] * head_stride + i_R[None, :]
    a_HR = tl.load(a_ptr_HR, mask=real_HR, other=0.0).to(tl.float32)
    b_HR = tl.load(a_ptr_HR + num_pairs, mask=real_HR, other=0.0).to(tl.float32)
    cos_1R, sin_1R = cos_R[None, :], sin_R[None, :]
    dtype = x_HD.dtype.element_ty
    tl.store(a_ptr_HR, (a_HR * cos_1R - b_HR * sin_1R).to(dtype), mask=real_HR)
    tl.store(a_ptr_HR + num_pairs, (b_HR * cos_1R + a_HR * sin_1R).to(dtype), mask=real_HR)
