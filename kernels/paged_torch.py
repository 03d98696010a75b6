"""The operators of `paged.py` in torch, for a CPU: whole pages gathered, then dense attention.

Inputs are taken as checked (`paged_checks`); the values of tables and lengths are checked here.
Shapes: P pages, S tokens a page, K kv heads, G query heads of a kv head, D head dim, B rows, M
table width, N tokens, L tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def decode(
    q_BHD: Tensor,
    key_PKSD: Tensor,
    value_PKSD: Tensor,
    page_BM: Tensor,
    length_B: Tensor,
    o_BHD: Tensor,
) -> None:
    """`paged.paged_decode` into `o_BHD`.

    All rows at once where padding to the longest at most doubles what is read; else those together
    whose numbers of pages lie between the same powers of two.
    """
    S = key_PKSD.shape[2]
    lengths: list[int] = length_B.tolist()
    _check_lengths(lengths, page_BM.shape[1] * S)
    counts = [-(-length // S) for length in lengths]
    is_even = max(counts) * len(counts) <= 2 * sum(counts)
    groups: dict[int, list[int]] = {}
    for row, count in enumerate(counts):
        group = 0 if not count else 1 if is_even else count.bit_length() + 1
        groups.setdefault(group, []).append(row)
    o_BHD[groups.pop(0, [])] = 0
    for rows in groups.values():
        M = -(-max(lengths[row] for row in rows) // S)
        if len(rows) == len(lengths):
            o_BHD.copy_(_attend(q_BHD, key_PKSD, value_PKSD, page_BM[:, :M], lengths))
            continue
        index = torch.tensor(rows)
        own = [lengths[row] for row in rows]
        o_BHD[index] = _attend(q_BHD[index], key_PKSD, value_PKSD, page_BM[index, :M], own)


def _attend(
    q_BHD: Tensor, key_PKSD: Tensor, value_PKSD: Tensor, page_BM: Tensor, lengths: list[int]
) -> Tensor:
    """Rows of at least one token, whose table is cut to the pages of the longest."""
    (B, H, D), (P, K, S, _) = q_BHD.shape, key_PKSD.shape
    length_B = torch.tensor(lengths)
    is_used_BM = torch.arange(page_BM.shape[1]) * S < length_B[:, None]
    is_wrong_BM = is_used_BM & ((page_BM < 0) | (page_BM >= P))
    if bool(is_wrong_BM.any()):
        wrong = int(page_BM[is_wrong_BM][0])
        raise ValueError(f"a used page is {wrong}, wanted 0 to {P - 1}: the pool's")
    # any page will do where none is used: what is there is overwritten below
    table_BM = torch.where(is_used_BM, page_BM, page_BM[:, :1]).long()
    k_BKLD, v_BKLD = (_pages(pool, table_BM) for pool in (key_PKSD, value_PKSD))
    L = k_BKLD.shape[2]
    for t_BKLD in (k_BKLD, v_BKLD):
        # weight 0 times NaN is NaN, so what is past a length goes
        for t_KLD, length in zip(t_BKLD.unbind(0), lengths, strict=True):
            if length < L:
                t_KLD[:, length:].zero_()
    # the query heads of a kv head are its queries: no head's keys are repeated
    q_BKGD = q_BHD.reshape(B, K, H // K, D).float()
    # one length needs no mask
    bias = None
    if min(lengths) < L:
        is_past_BL = torch.arange(L) >= length_B[:, None]
        bias = torch.zeros(B, 1, 1, L).masked_fill_(is_past_BL[:, None, None], -torch.inf)
    o_BKGD = F.scaled_dot_product_attention(q_BKGD, k_BKLD, v_BKLD, attn_mask=bias)
    return o_BKGD.view(B, H, D).to(q_BHD.dtype)


def _pages(pool_PKSD: Tensor, table_BM: Tensor) -> Tensor:
    """A row's pages end to end, [B, K, M*S, D] in fp32, each value copied once."""
    K, S, D = pool_PKSD.shape[1:]
    B, M = table_BM.shape
    if pool_PKSD.shape[0] > 1 and pool_PKSD.stride(0) % (S * D):
        pages = pool_PKSD.index_select(0, table_BM.flatten()).view(B, M, K, S, D)
        return pages.transpose(1, 2).reshape(B, K, M * S, D).float()
    # a page and head is a row of a matrix, also where pages are further apart
    apart = pool_PKSD.stride(0) // (S * D) if pool_PKSD.shape[0] > 1 else K
    flat = pool_PKSD.as_strided(
        ((pool_PKSD.shape[0] - 1) * apart + K, S * D), (S * D, 1), pool_PKSD.storage_offset()
    )
    at_BKM = table_BM[:, None] * apart + torch.arange(K)[:, None]
    return flat.index_select(0, at_BKM.flatten()).view(B, K, M * S, D).float()


def store(
    key_PKSD: Tensor,
    value_PKSD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    page_N: Tensor,
    offset_N: Tensor,
) -> None:
    """`paged.paged_store`."""
    P, _, S, _ = key_PKSD.shape
    is_kept_N = page_N >= 0
    if not bool(is_kept_N.all()):
        kept = is_kept_N.nonzero().squeeze(1)
        k_NKD, v_NKD, page_N, offset_N = (t[kept] for t in (k_NKD, v_NKD, page_N, offset_N))
        if not len(kept):
            return
    for name, index_N, count in (("page", page_N, P), ("offset", offset_N, S)):
        low, high = int(index_N.min()), int(index_N.max())
        if low < 0 or high >= count:
            raise ValueError(f"{name} holds {low if low < 0 else high}, wanted 0 to {count - 1}")
    page_N, offset_N = page_N.long(), offset_N.long()
    key_PKSD[page_N, :, offset_N] = k_NKD.to(key_PKSD.dtype)
    value_PKSD[page_N, :, offset_N] = v_NKD.to(value_PKSD.dtype)


def gather(pool_PKSD: Tensor, page_M: Tensor, num_tokens: int) -> Tensor:
    """`paged.paged_gather` of the pages that are full, and of the last."""
    _, K, S, D = pool_PKSD.shape
    out_KLD = pool_PKSD.new_empty(K, num_tokens, D)
    full = num_tokens // S
    pages = pool_PKSD.index_select(0, page_M.long())
    out_KLD[:, : full * S].view(K, full, S, D).copy_(pages[:full].transpose(0, 1))
    if full * S < num_tokens:
        out_KLD[:, full * S :] = pages[full, :, : num_tokens - full * S]
    return out_KLD


def _check_lengths(lengths: list[int], most: int) -> None:
    for row, length in enumerate(lengths):
        if not 0 <= length <= most:
            raise ValueError(f"length[{row}] is {length}, wanted 0 to {most}: what its table holds")
