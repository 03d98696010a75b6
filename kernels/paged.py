"""Attention of one token a row over keys and values in pages; new tokens in, a prefix out.

On CUDA Triton, elsewhere torch. Every page of a pool holds S tokens of all kv heads of one layer.
Shapes: P pages of a pool, S tokens a page, K kv heads, H query heads, D head dim, B rows, M pages
of a row's table, N tokens to store, L tokens to gather.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from m1serve.kernels import paged_torch
from m1serve.kernels.paged_checks import check_decode, check_pages, check_pool, check_store


def paged_decode(
    q_BHD: Tensor,
    key_PKSD: Tensor,
    value_PKSD: Tensor,
    page_BM: Tensor,
    length_B: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """o [B, H, D] in q's dtype: softmax(q keyᵀ / sqrt(D)) value, fp32 inside, no gradients.

    Row b attends to the first length_B[b] tokens of the pages that page_BM[b] names in order, so
    its own token is stored before; a length of 0 gives zeros. What lies past a length is never
    read: free pages, the rest of the last page and unused entries of the table may hold anything.
    page_BM is int32, length_B int32 or int64, both on q's device. On CUDA q is rounded to the
    pool's dtype, nothing is read back by the host, the grid comes from shapes (fit for a CUDA
    graph), a row's bits do not depend on the other rows, a length beyond the table counts as the
    table, and a used page outside the pool gives NaN. On a CPU both are ValueErrors.
    """
    check_decode(q_BHD, key_PKSD, value_PKSD, page_BM, length_B, out)
    o_BHD = torch.empty(q_BHD.shape, dtype=q_BHD.dtype, device=q_BHD.device) if out is None else out
    if not q_BHD.numel():
        return o_BHD
    if q_BHD.is_cuda:
        from m1serve.kernels import paged_triton

        paged_triton.decode(q_BHD, key_PKSD, value_PKSD, page_BM, length_B, o_BHD)
    else:
        paged_torch.decode(q_BHD, key_PKSD, value_PKSD, page_BM, length_B, o_BHD)
    return o_BHD


def paged_store(
    key_PKSD: Tensor,
    value_PKSD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    page_N: Tensor,
    offset_N: Tensor,
) -> None:
    """Writes token n to place offset_N[n] of page page_N[n]; a negative page stores nothing.

    page_N and offset_N are int32 or int64 on the pool's device; values take the pool's dtype. No
    place may be named twice. On CUDA one launch, fit for a CUDA graph; there a page or place past
    the end stores nothing, on a CPU it is a ValueError.
    """
    check_store(key_PKSD, value_PKSD, k_NKD, v_NKD, page_N, offset_N)
    if not k_NKD.numel():
        return
    if key_PKSD.is_cuda:
        from m1serve.kernels import paged_copy_triton

        paged_copy_triton.store(key_PKSD, value_PKSD, k_NKD, v_NKD, page_N, offset_N)
    else:
        paged_torch.store(key_PKSD, value_PKSD, k_NKD, v_NKD, page_N, offset_N)


def paged_gather(pool_PKSD: Tensor, pages: Sequence[int] | Tensor, num_tokens: int) -> Tensor:
    """The first `num_tokens` tokens of one sequence as a contiguous [K, L, D].

    `pages` names at least ceil(L / S) pages in order; more are not read. A list is copied to the
    pool's device; a tensor's values are not checked on a device, where a page outside the pool
    gives NaN.
    """
    check_pool(pool_PKSD, "pool")
    page_M = check_pages(pages, pool_PKSD, num_tokens)
    if pool_PKSD.is_cuda and num_tokens:
        from m1serve.kernels import paged_copy_triton

        return paged_copy_triton.gather(pool_PKSD, page_M, num_tokens)
    return paged_torch.gather(pool_PKSD, page_M, num_tokens)
