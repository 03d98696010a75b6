"""Copies into pages and out of them in Triton: what `paged.py` stores and gathers on CUDA.

Shapes: P pages of S tokens, K kv heads, D head dim, N tokens to store, L tokens to gather.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201  (a jit kernel's annotations are constexpr only)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from m1serve.kernels.after_triton import pdl, release, wait

GATHERED_TOKENS = 64


def store(
    key_PKSD: Tensor,
    value_PKSD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    page_N: Tensor,
    offset_N: Tensor,
) -> None:
    """`paged.paged_store` of checked inputs: a token a program."""
    (P, K, S, D), N = key_PKSD.shape, len(page_N)
    with torch.cuda.device_of(key_PKSD):
        store_kernel[(N,)](
            *(key_PKSD, value_PKSD, k_NKD, v_NKD, page_N, offset_N),
            *(P, key_PKSD.stride(0), value_PKSD.stride(0)),
            *k_NKD.stride()[:2],
            *v_NKD.stride()[:2],
            K=K,
            S=S,
            D=D,
            BLOCK_K=triton.next_power_of_2(K),
            num_warps=4,
            # said, because triton 3.9 warns where its default is taken
            enable_fp_fusion=True,
            **pdl(key_PKSD),
        )


def gather(pool_PKSD: Tensor, page_M: Tensor, num_tokens: int) -> Tensor:
    """`paged.paged_gather` of checked inputs: some tokens of a head a program."""
    P, K, S, D = pool_PKSD.shape
    out_KLD = torch.empty(K, num_tokens, D, dtype=pool_PKSD.dtype, device=pool_PKSD.device)
    with torch.cuda.device_of(pool_PKSD):
        gather_kernel[(triton.cdiv(num_tokens, GATHERED_TOKENS), K)](
            *(pool_PKSD, page_M, out_KLD, P, num_tokens, pool_PKSD.stride(0)),
            S=S,
            D=D,
            BLOCK_L=GATHERED_TOKENS,
            num_warps=4,
            enable_fp_fusion=True,
            **pdl(pool_PKSD),
        )
    return out_KLD


@triton.jit
def store_kernel(
    key_PKSD,
    value_PKSD,
    k_NKD,
    v_NKD,
    page_N,
    offset_N,
    num_pages,
    key_page,
    value_page,
    k_row,
    k_head,
    v_row,
    v_head,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WAIT: tl.constexpr,
):
    release(WAIT)
    wait(WAIT)
    n = tl.program_id(0).to(tl.int64)
    i_K = tl.arange(0, BLOCK_K)
    i_D = tl.arange(0, D)
    real_KD = (i_K < K)[:, None] & (i_D < D)[None, :]
    page = tl.load(page_N + n).to(tl.int64)
    offset = tl.load(offset_N + n).to(tl.int64)
    if (page >= 0) & (page < num_pages) & (offset >= 0) & (offset < S):
        within_KD = i_K[:, None] * (S * D) + offset * D + i_D[None, :]
        k_KD = tl.load(k_NKD + n * k_row + i_K[:, None] * k_head + i_D[None, :], mask=real_KD)
        v_KD = tl.load(v_NKD + n * v_row + i_K[:, None] * v_head + i_D[None, :], mask=real_KD)
        dtype = key_PKSD.dtype.element_ty
        tl.store(key_PKSD + page * key_page + within_KD, k_KD.to(dtype), mask=real_KD)
        tl.store(value_PKSD + page * value_page + within_KD, v_KD.to(dtype), mask=real_KD)


@triton.jit
def gather_kernel(
    pool_PKSD,
    page_M,
    out_KLD,
    num_pages,
    num_tokens,
    pool_page,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    WAIT: tl.constexpr,
):
    release(WAIT)
    wait(WAIT)
    head = tl.program_id(1).to(tl.int64)
    token_L = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    i_D = tl.arange(0, D)
    real_L = token_L < num_tokens
    page_L = tl.load(page_M + token_L // S, mask=real_L, other=0).to(tl.int64)
    has_page_L = (page_L >= 0) & (page_L < num_pages)
    ptr_L = pool_PKSD + page_L * pool_page + head * (S * D) + (token_L % S) * D
    mask_LD = (real_L & has_page_L)[:, None] & (i_D < D)[None, :]
    x_LD = tl.load(ptr_L[:, None] + i_D[None, :], mask=mask_LD, other=0.0)
    x_LD = tl.where(has_page_L[:, None], x_LD, float("nan")).to(x_LD.dtype)
    at_L = (head * num_tokens + token_L) * D
    tl.store(out_KLD + at_L[:, None] + i_D[None, :], x_LD, mask=real_L[:, None])
