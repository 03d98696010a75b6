"""What the operators over paged keys and values refuse before any launch.

Nothing here reads a device tensor's values: shapes, strides and dtypes only, or host data.
Shapes: P pages, S tokens a page, K kv heads, H query heads, D head dim, B rows, M table width,
N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from m1serve.kernels.checks import (
    DTYPES,
    MAX_ROWS,
    check_devices,
    check_dtypes,
    check_index_tensor,
    check_last_dim,
    check_tensors,
)

HEAD_DIMS = (16, 32, 64, 128, 256)
PAGE_TOKENS = (16, 32, 64, 128, 256)


def check_pool(pool_PKSD: Tensor, name: str) -> None:
    """[P, K, S, D] of DTYPES; each page is contiguous, and pages lie any distance apart."""
    check_tensors(**{name: pool_PKSD})
    if pool_PKSD.dim() != 4 or not all(pool_PKSD.shape):
        raise ValueError(
            f"{name} has shape {list(pool_PKSD.shape)}, wanted [pages, kv heads, tokens, dim]"
        )
    _, _, S, D = pool_PKSD.shape
    if D not in HEAD_DIMS:
        raise ValueError(f"head_dim is {D}, wanted one of {HEAD_DIMS}")
    if S not in PAGE_TOKENS:
        raise ValueError(f"{name} has {S} tokens a page, wanted one of {PAGE_TOKENS}")
    if pool_PKSD.dtype not in DTYPES:
        raise ValueError(f"{name} is {pool_PKSD.dtype}, wanted one of {DTYPES}")
    if pool_PKSD.stride()[1:] != (S * D, D, 1):
        raise ValueError(
            f"a page of {name} has strides {list(pool_PKSD.stride()[1:])}, wanted contiguous "
            f"{[S * D, D, 1]}"
        )


def check_pools(key_PKSD: Tensor, value_PKSD: Tensor) -> None:
    check_pool(key_PKSD, "key")
    check_pool(value_PKSD, "value")
    if value_PKSD.shape != key_PKSD.shape:
        raise ValueError(
            f"value has shape {list(value_PKSD.shape)}, wanted that of key, {list(key_PKSD.shape)}"
        )
    check_dtypes(key_PKSD.dtype, value=value_PKSD)
    check_devices(key_PKSD.device, value=value_PKSD)


def check_decode(
    q_BHD: Tensor,
    key_PKSD: Tensor,
    value_PKSD: Tensor,
    page_BM: Tensor,
    length_B: Tensor,
    out_BHD: Tensor | None,
) -> None:
    """All of one decode step but what the table and the lengths hold."""
    check_pools(key_PKSD, value_PKSD)
    check_tensors(q=q_BHD, page=page_BM, length=length_B)
    K, D = key_PKSD.shape[1], key_PKSD.shape[3]
    if q_BHD.dim() != 3 or q_BHD.shape[2] != D or not q_BHD.shape[1] or q_BHD.shape[1] % K:
        raise ValueError(
            f"q has shape {list(q_BHD.shape)}, wanted [rows, a multiple of {K} heads, {D}]"
        )
    B = q_BHD.shape[0]
    if B > MAX_ROWS:
        raise ValueError(f"q has {B} rows, wanted at most {MAX_ROWS}: split the step")
    check_last_dim(q_BHD, "q")
    check_dtypes(q_BHD.dtype, q=q_BHD)
    if page_BM.dim() != 2 or page_BM.shape[0] != B or page_BM.dtype != torch.int32:
        raise ValueError(
            f"page is {page_BM.dtype} {list(page_BM.shape)}, wanted torch.int32 [{B}, pages a row]"
        )
    if page_BM.shape[1] > 1 and page_BM.stride(1) != 1:
        raise ValueError(f"page has stride {page_BM.stride(1)} along a row, wanted 1")
    _check_index(length_B, "length", B)
    check_devices(q_BHD.device, key=key_PKSD, page=page_BM, length=length_B)
    if out_BHD is not None:
        check_tensors(out=out_BHD)
        if out_BHD.shape != q_BHD.shape or out_BHD.dtype != q_BHD.dtype:
            raise ValueError(
                f"out is {out_BHD.dtype} {list(out_BHD.shape)}, wanted q's {q_BHD.dtype} "
                f"{list(q_BHD.shape)}"
            )
        check_last_dim(out_BHD, "out")
        check_devices(q_BHD.device, out=out_BHD)


def check_store(
    key_PKSD: Tensor,
    value_PKSD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    page_N: Tensor,
    offset_N: Tensor,
) -> None:
    check_pools(key_PKSD, value_PKSD)
    named = {"k": k_NKD, "v": v_NKD}
    check_tensors(**named, page=page_N, offset=offset_N)
    wanted = [page_N.shape[0] if page_N.dim() else 0, key_PKSD.shape[1], key_PKSD.shape[3]]
    for name, tensor in named.items():
        if list(tensor.shape) != wanted:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, wanted {wanted}")
        check_last_dim(tensor, name)
    check_dtypes(k_NKD.dtype, **named)
    _check_index(page_N, "page", wanted[0])
    _check_index(offset_N, "offset", wanted[0])
    check_devices(key_PKSD.device, **named, page=page_N, offset=offset_N)


def check_pages(pages: Sequence[int] | Tensor, pool_PKSD: Tensor, num_tokens: int) -> Tensor:
    """The pages that `num_tokens` tokens fill, as an index tensor on the pool's device."""
    P, _, S, _ = pool_PKSD.shape
    if num_tokens < 0:
        raise ValueError(f"num_tokens is {num_tokens}, wanted 0 or more")
    if isinstance(pages, Tensor):
        check_index_tensor(pages, "pages")
        page_M = pages
    else:
        page_M = torch.tensor(list(pages), dtype=torch.int64)
    num_pages = -(-num_tokens // S)
    if page_M.numel() < num_pages:
        raise ValueError(
            f"pages names {page_M.numel()} pages of {S} tokens, wanted {num_pages} for "
            f"{num_tokens} tokens"
        )
    page_M = page_M[:num_pages]
    if page_M.device.type == "cpu" and num_pages:
        low, high = int(page_M.min()), int(page_M.max())
        if low < 0 or high >= P:
            raise ValueError(f"pages holds {low if low < 0 else high}, wanted 0 to {P - 1}")
    return page_M.to(pool_PKSD.device)


def _check_index(index_N: Tensor, name: str, count: int) -> None:
    check_index_tensor(index_N, name)
    if index_N.shape != (count,) or (count > 1 and index_N.stride(0) != 1):
        raise ValueError(
            f"{name} has shape {list(index_N.shape)} and stride {index_N.stride(0)}, wanted "
            f"contiguous [{count}]"
        )
