"""Decode attention over pages in Triton: keys are split among programs, and the parts joined.

A row's tokens are cut into splits by its own length alone, so no row's bits depend on the others. A
fixed number of programs goes through the splits of all rows, each finding its own from the lengths
on the device. The query heads of a kv head are the rows of a tensor core's tile.
Shapes: B rows, H = K*G query heads, K kv heads, D head dim, P pages of S tokens, M table width, C
splits of a row; tiles are G x N: query heads, tokens.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202  (a jit kernel's annotations are constexpr only)
from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from m1serve.kernels.after_triton import pdl, release, wait

MIN_TILES = 2
"""Tiles of BLOCK_N tokens in the smallest split: fewer cost more to join than they save."""
MAX_SPLITS = 128
PROGRAMS_OF_AN_SM = 2


def decode(
    q_BHD: Tensor,
    key_PKSD: Tensor,
    value_PKSD: Tensor,
    page_BM: Tensor,
    length_B: Tensor,
    o_BHD: Tensor,
    *,
    num_programs: int | None = None,
) -> None:
    """`paged.paged_decode` of checked inputs into `o_BHD`, in two launches.

    `num_programs` stands in for what the device holds, where it is not a GPU.
    """
    (B, H, D), (P, K, S, _), M = q_BHD.shape, key_PKSD.shape, page_BM.shape[1]
    if num_programs is None:
        num_programs = PROGRAMS_OF_AN_SM * _num_sms(q_BHD.device)
    options = tiling(D, key_PKSD.dtype)
    block_n = options["BLOCK_N"]
    C = num_splits(M * S, num_programs, K, block_n)
    part_BHCD = torch.empty(B, H, C, D, device=q_BHD.device)
    lse_BHC = torch.empty(B, H, C, device=q_BHD.device)
    sizes = {"MIN_TILES": MIN_TILES, "D": D, "enable_fp_fusion": True, **pdl(q_BHD)}
    with torch.cuda.device_of(q_BHD):
        split_kernel[(min(num_programs, B * K * C),)](
            *(q_BHD, key_PKSD, value_PKSD, page_BM, length_B, part_BHCD, lse_BHC),
            *(B, P, M * S, C, H // K),
            *q_BHD.stride()[:2],
            *(key_PKSD.stride(0), value_PKSD.stride(0), page_BM.stride(0)),
            D**-0.5 * math.log2(math.e),
            K=K,
            S=S,
            BLOCK_G=max(16, triton.next_power_of_2(H // K)),
            BLOCK_B=triton.next_power_of_2(B),
            PRECISION="ieee" if key_PKSD.dtype == torch.float32 else "tf32",
            **options,
            **sizes,
        )
        join_kernel[(H, B)](
            *(part_BHCD, lse_BHC, o_BHD, length_B),
            *(M * S, C),
            *o_BHD.stride()[:2],
            H=H,
            BLOCK_N=block_n,
            BLOCK_C=32,
            num_warps=4,
            **sizes,
        )


def tiling(head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Two programs of an SM fit its shared memory, each with two tiles on their way."""
    if dtype == torch.float32:
        return {"BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_N": 64 if head_dim <= 128 else 32, "num_warps": 4, "num_stages": 3}


def num_splits(num_tokens: int, num_programs: int, num_kv_heads: int, block_n: int) -> int:
    """Of a row of so many tokens; a full row of all kv heads occupies every program once."""
    most = min(MAX_SPLITS, max(1, num_programs // num_kv_heads))
    return max(1, min(most, -(-num_tokens // (block_n * MIN_TILES))))


@lru_cache
def _num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _clamped(length, max_tokens):
    return tl.minimum(tl.maximum(length, 0), max_tokens).to(tl.int32)


@triton.jit
def _splits(
    length_B,
    i_B,
    num_rows,
    max_tokens,
    num_splits,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """Of every row; none of a row of no tokens."""
    length_i = _clamped(tl.load(length_B + i_B, mask=i_B < num_rows, other=0), max_tokens)
    tiles_i = _parts(length_i, BLOCK_N)
    return _parts(tiles_i, _tiles_of_a_split(tiles_i, num_splits, MIN_TILES))


@triton.jit
def _tiles_of_a_split(num_tiles, num_splits, MIN_TILES: tl.constexpr):
    """0 for a row of no tokens."""
    return _parts(num_tiles, tl.minimum(_parts(num_tiles, MIN_TILES), num_splits))


@triton.jit
def _parts(number, size):
    """How many parts of a size make up a number; of size 0 as of size 1."""
    size = tl.maximum(size, 1)
    return (number + size - 1) // size


@triton.jit
def split_kernel(
    q_BHD,
    key_PKSD,
    value_PKSD,
    page_BM,
    length_B,
    part_BHCD,
    lse_BHC,
    num_rows,
    num_pages,
    max_tokens,
    num_splits,
    num_group,
    q_row,
    q_head,
    key_page,
    value_page,
    page_row,
    scale,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PRECISION: tl.constexpr,
    WAIT: tl.constexpr,
):
    release(WAIT)
    wait(WAIT)
    i_B = tl.arange(0, BLOCK_B)
    i_G = tl.arange(0, BLOCK_G)
    i_D = tl.arange(0, D)
    i_N = tl.arange(0, BLOCK_N)
    real_G = i_G < num_group
    real_GD = real_G[:, None] & (i_D < D)[None, :]
    total = tl.sum(_splits(length_B, i_B, num_rows, max_tokens, num_splits, BLOCK_N, MIN_TILES))
    for item in range(tl.program_id(0), total * K, tl.num_programs(0)):
        # all heads of a split come one after another, all splits of a row, all rows
        head = item % K
        place = item // K
        # counted again for each item: kept, they would cost the loop below its registers
        splits_i = _splits(length_B, i_B, num_rows, max_tokens, num_splits, BLOCK_N, MIN_TILES)
        before_i = tl.cumsum(splits_i, 0) <= place
        row = tl.sum(before_i.to(tl.int32))
        split = place - tl.sum(tl.where(before_i, splits_i, 0))
        length = _clamped(tl.load(length_B + row), max_tokens)
        each = _tiles_of_a_split(_parts(length, BLOCK_N), num_splits, MIN_TILES) * BLOCK_N
        start = split * each
        end = tl.minimum(start + each, length)
        row = row.to(tl.int64)
        q_ptr_GD = q_BHD + row * q_row + (head * num_group + i_G)[:, None] * q_head + i_D[None, :]
        q_GD = tl.load(q_ptr_GD, mask=real_GD, other=0.0).to(key_PKSD.dtype.element_ty)
        page_ptr = page_BM + row * page_row
        m_G = tl.full([BLOCK_G], float("-inf"), tl.float32)
        sum_G = tl.zeros([BLOCK_G], tl.float32)
        acc_GD = tl.zeros([BLOCK_G, D], tl.float32)
        # a tile's pages are asked for a step ahead of its keys
        first_N = start + i_N
        page_N = tl.load(page_ptr + first_N // S, mask=first_N < end, other=0)
        for first in range(start, end, BLOCK_N):
            token_N = first + i_N
            real_N = token_N < end
            has_page_N = real_N & (page_N >= 0) & (page_N < num_pages)
            within_N = head * (S * D) + (token_N % S) * D
            k_ptr_N = key_PKSD + page_N.to(tl.int64) * key_page + within_N
            v_ptr_N = value_PKSD + page_N.to(tl.int64) * value_page + within_N
            mask_N1 = has_page_N[:, None]
            k_ND = tl.load(k_ptr_N[:, None] + i_D[None, :], mask=mask_N1, other=0.0)
            v_ND = tl.load(v_ptr_N[:, None] + i_D[None, :], mask=mask_N1, other=0.0)
            next_N = token_N + BLOCK_N
            page_N = tl.load(page_ptr + next_N // S, mask=next_N < end, other=0)
            s_GN = tl.dot(q_GD, tl.trans(k_ND), input_precision=PRECISION) * scale
            missing_N = tl.where(real_N, float("nan"), float("-inf"))
            s_GN = tl.where(has_page_N[None, :], s_GN, missing_N[None, :])
            m_next_G = tl.maximum(m_G, tl.max(s_GN, 1))
            keep_G = tl.exp2(m_G - m_next_G)
            p_GN = tl.exp2(s_GN - m_next_G[:, None])
            sum_G = sum_G * keep_G + tl.sum(p_GN, 1)
            acc_GD = acc_GD * keep_G[:, None]
            acc_GD = tl.dot(p_GN.to(v_ND.dtype), v_ND, acc_GD, input_precision=PRECISION)
            m_G = m_next_G
        at_G = (row * K * num_group + head * num_group + i_G) * num_splits + split
        o_ptr_GD = part_BHCD + at_G[:, None] * D + i_D[None, :]
        tl.store(o_ptr_GD, acc_GD / sum_G[:, None], mask=real_GD)
        tl.store(lse_BHC + at_G, m_G + tl.log2(sum_G), mask=real_G)


@triton.jit
def join_kernel(
    part_BHCD,
    lse_BHC,
    o_BHD,
    length_B,
    max_tokens,
    num_splits,
    o_row,
    o_head,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WAIT: tl.constexpr,
):
    release(WAIT)
    wait(WAIT)
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_C, i_D = tl.arange(0, BLOCK_C), tl.arange(0, D)
    num_tiles = _parts(_clamped(tl.load(length_B + row), max_tokens), BLOCK_N)
    each = _tiles_of_a_split(num_tiles, num_splits, MIN_TILES)
    count = _parts(num_tiles, each)
    # from here on in the order of the splits: two runs give the same bits
    at = (row * H + head) * num_splits
    m = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc_D = tl.zeros([D], tl.float32)
    for first in range(0, count, BLOCK_C):
        real_C = first + i_C < count
        lse_C = tl.load(lse_BHC + at + first + i_C, mask=real_C, other=float("-inf"))
        part_ptr_CD = part_BHCD + (at + first + i_C)[:, None] * D + i_D[None, :]
        part_CD = tl.load(part_ptr_CD, mask=real_C[:, None], other=0.0)
        m_next = tl.maximum(m, tl.max(lse_C, 0))
        weight_C = tl.exp2(lse_C - m_next)
        keep = tl.exp2(m - m_next)
        total = total * keep + tl.sum(weight_C, 0)
        acc_D = acc_D * keep + tl.sum(part_CD * weight_C[:, None], 0)
        m = m_next
    o_D = tl.where(count > 0, acc_D / tl.where(count > 0, total, 1.0), 0.0)
    tl.store(o_BHD + row * o_row + head * o_head + i_D, o_D.to(o_BHD.dtype.element_ty))
