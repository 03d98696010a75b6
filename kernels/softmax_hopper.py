"""Softmax attention for Hopper: bf16, head dim 128, warps specialised (Gluon).

One program attends for 128 queries of one head, from their last block of 128 keys to the first. A
producer warp streams queries, keys and values by TMA; two warpgroups own 64 queries each and take
turns at the tensor cores: while one multiplies, the other takes its softmax. Within a warpgroup the
next block's scores are under way before the last block's values are added. Only the first block
has a mask: the diagonal of a causal program, the end of the keys of any other.
Shapes: T queries, L keys, H heads, K kv heads, D = 128; M = 64 queries of a warpgroup, N = 128 keys
of a block.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202  (a jit kernel's annotations are constexpr only)
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from m1serve.kernels.hopper import descriptor

HEAD_DIM = 128
QUERIES, KEYS = 128, 128
"""Of a program, and of a block; equal, so that a causal program's last block is the diagonal."""
STAGES = 2
"""Blocks of keys, and of values, on their way: what shared memory holds beside the queries."""
_D = gl.constexpr(HEAD_DIM)
_M = gl.constexpr(QUERIES // 2)
_N = gl.constexpr(KEYS)
_STAGES = gl.constexpr(STAGES)
# log2(e) / sqrt(D): scores become exponents of 2 in one multiplication
_SCALE = gl.constexpr(1.4426950408889634 / HEAD_DIM**0.5)
_LN2 = gl.constexpr(0.6931471805599453)


def _fade_asm(count: int) -> str:
    """PTX of `count` products $i = o fade, which lie in fours: two of a row, two of the other."""
    o, fade = [f"${count + i}" for i in range(count)], [f"${2 * count + i}" for i in range(count)]
    test = f"setp.eq.f32 p, {fade[0]}, 1.0; setp.eq.and.f32 p, {fade[2]}, 1.0, p; "
    products = " ".join(f"mul.f32 ${i}, {o[i]}, {fade[i]};" for i in range(count))
    return (
        f"{{ .reg .pred p; {test} vote.sync.all.pred p, p, 0xffffffff; @p bra DONE; "
        f"{products} DONE: }}"
    )


_FADED = gl.constexpr(32)
"""Values of a thread that one branch spares."""
_FADE = gl.constexpr(_fade_asm(32))
# o is given in the registers of the results
_FADE_REGISTERS = gl.constexpr(",".join(["=f"] * 32 + [str(i) for i in range(32)] + ["f"] * 32))

# Gluon's names up to triton 3.8, and from 3.9 on
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@dataclass(frozen=True, slots=True)
class Place:
    """Where the tiles of keys or values lie: of a head, so many rows and columns further on."""

    tiles: TensorDescriptor
    head_row: int
    head_column: int

    @classmethod
    def of(cls, t_LKD: Tensor) -> Place:
        """Heads one after the other, as of a gathered past, or side by side, as of a projection."""
        (L, K, D), (row, head, _) = t_LKD.shape, t_LKD.stride()
        if head < L * row or head % row:
            return cls(descriptor(t_LKD, KEYS, D), 0, head)
        rows = head // row
        flat_RD = t_LKD.as_strided(((K - 1) * rows + L, 1, D), (row, row, 1))
        return cls(descriptor(flat_RD, KEYS, D), rows, 0)


def attend(
    q_THD: Tensor, k_LKD: Tensor, v_LKD: Tensor, *, is_causal: bool, takes_turns: bool = True
) -> tuple[Tensor, Tensor]:
    """o [T, H, D] in bf16 and the fp32 log-sum-exp [H, T] of the scaled scores.

    Tensors that `hopper.fits`, at least one query and one key; causal ones have T = L. Without
    `takes_turns` the warpgroups multiply as they come, to the same bits.
    """
    (T, H, D), K = q_THD.shape, k_LKD.shape[1]
    o_THD = torch.empty(T, H, D, dtype=q_THD.dtype, device=q_THD.device)
    lse_HT = torch.empty(H, T, dtype=torch.float32, device=q_THD.device)
    keys, values = Place.of(k_LKD), Place.of(v_LKD)
    with torch.cuda.device_of(q_THD):
        attend_kernel[(-(-T // QUERIES) * H,)](
            descriptor(q_THD, QUERIES // 2, D),
            keys.tiles,
            values.tiles,
            descriptor(o_THD, QUERIES // 2, D),
            lse_HT,
            *(T, k_LKD.shape[0]),
            *(q_THD.stride(1), keys.head_column, values.head_column),
            *(keys.head_row, values.head_row),
            H=H,
            K=K,
            CAUSAL=is_causal,
            TURNS=takes_turns,
            num_warps=4,
            # said, because triton 3.9 warns where its default is taken
            enable_fp_fusion=True,
        )
    return o_THD, lse_HT


@gluon.jit
def _produce(q_desc, k_desc, v_desc, tiles, bars, where):
    q_pair, k_ring, v_ring = tiles
    q_full, k_full, k_empty, v_full, v_empty, _, _ = bars
    query, q_col, k_row, k_col, v_row, v_col, num_blocks = where
    mbarrier.expect(q_full, 2 * 2 * _M * _D)
    _load(q_desc, [query, q_col], q_full, q_pair.index(0))
    _load(q_desc, [query + _M, q_col], q_full, q_pair.index(1))
    for j in range(num_blocks):
        s = j % _STAGES
        phase = ((j // _STAGES) & 1) ^ 1
        at = (num_blocks - 1 - j) * _N
        mbarrier.wait(k_empty.index(s), phase)
        mbarrier.expect(k_full.index(s), 2 * _N * _D)
        _load(k_desc, [k_row + at, k_col], k_full.index(s), k_ring.index(s))
        mbarrier.wait(v_empty.index(s), phase)
        mbarrier.expect(v_full.index(s), 2 * _N * _D)
        _load(v_desc, [v_row + at, v_col], v_full.index(s), v_ring.index(s))


@gluon.jit
def _scores(q, k, mma: gl.constexpr):
    """q kᵀ [M, N], under way."""
    s_MN = gl.zeros([_M, _N], gl.float32, mma)
    return warpgroup_mma(q, k.permute((1, 0)), s_MN, use_acc=False, is_async=True)


@gluon.jit
def _weights(s_MN, most_M, left: gl.constexpr):
    """exp of the scores above the rows' largest so far: rounded, their sums, and that largest."""
    now_M = gl.maximum(most_M, gl.max(s_MN, 1))
    p_MN = gl.exp2(s_MN * _SCALE - (now_M * _SCALE)[:, None])
    return gl.convert_layout(p_MN.to(gl.bfloat16), left), gl.sum(p_MN, 1), now_M


@gluon.jit
def _faded(o_MD, fade_MD):
    """o fade; a warp whose fades are all 1, as most are far into the keys, is spared it."""
    return gl.inline_asm_elementwise(
        _FADE, _FADE_REGISTERS, [o_MD, fade_MD], dtype=gl.float32, is_pure=True, pack=_FADED
    )


@gluon.jit
def _first_block(q, k_ring, k_full, k_empty, rest, PART: gl.constexpr, CAUSAL: gl.constexpr):
    """Masked scores [M, N] of the block that has a mask; `rest` keys of it exist."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _N, 16])
    mbarrier.wait(k_full.index(0), 0)
    s_MN = _scores(q, k_ring.index(0), mma)
    s_MN = warpgroup_mma_wait(0, deps=[s_MN])
    mbarrier.arrive(k_empty.index(0), count=1)
    i_M = PART * _M + gl.arange(0, _M, gl.SliceLayout(1, mma))
    i_N = gl.arange(0, _N, gl.SliceLayout(0, mma))
    if CAUSAL:
        seen_MN = i_N[None, :] <= i_M[:, None]
    else:
        seen_MN = (i_N < rest)[None, :] & (i_M >= 0)[:, None]
    return gl.where(seen_MN, s_MN, float("-inf"))


@gluon.jit
def _blank_rows(tile, count):
    """Zero a tile's rows from `count` on: another head's values, or nobody's, which may be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, _M, gl.SliceLayout(1, layout))
    kept = gl.where((rows < count)[:, None], tile.load(layout), 0.0)
    tile.store(kept.to(gl.bfloat16))


@gluon.jit
def _attend(
    out, tiles, bars, where, PART: gl.constexpr, CAUSAL: gl.constexpr, TURNS: gl.constexpr
):  # fmt: skip
    """A warpgroup: 64 queries over all blocks of keys."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _N, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    q_pair, k_ring, v_ring = tiles
    q_full, k_full, k_empty, v_full, v_empty, turn, blanked = bars
    num_blocks, num_keys = where
    q = q_pair.index(PART)
    mbarrier.wait(q_full, 0)
    rest = num_keys - (num_blocks - 1) * _N
    s_MN = _first_block(q, k_ring, k_full, k_empty, rest, PART, CAUSAL)
    most_M = gl.full([_M], float("-inf"), gl.float32, gl.SliceLayout(1, mma))
    p_MN, total_M, most_M = _weights(s_MN, most_M, left)
    o_MD = gl.zeros([_M, _D], gl.float32, mma)
    mbarrier.wait(v_full.index(0), 0)
    if not CAUSAL:  # noqa: SIM102  (known when compiled, the other when run)
        if rest < _N:
            _blank_rows(v_ring.index(0).slice(PART * _M, _M, 0), rest - PART * _M)
            fence_async_shared()
            mbarrier.arrive(blanked, count=1)
            mbarrier.wait(blanked, 0)
    for j in range(1, num_blocks):
        s = j % _STAGES
        before = (j - 1) % _STAGES
        phase = (j // _STAGES) & 1
        mbarrier.wait(k_full.index(s), phase)
        if TURNS:
            mbarrier.wait(turn.index(PART), (j & 1) ^ PART)
        s_MN = _scores(q, k_ring.index(s), mma)
        o_MD = warpgroup_mma(p_MN, v_ring.index(before), o_MD, is_async=True)
        if TURNS:
            mbarrier.arrive(turn.index(1 - PART), count=1)
        s_MN = warpgroup_mma_wait(1, deps=[s_MN])
        mbarrier.arrive(k_empty.index(s), count=1)
        last_M = most_M
        next_MN, sum_M, most_M = _weights(s_MN, last_M, left)
        fade_M = gl.exp2((last_M - most_M) * _SCALE)
        total_M = total_M * fade_M + sum_M
        # here, so that ptxas does not move the wait for the products in front of the exponentials
        mbarrier.wait(v_full.index(s), phase)
        o_MD = warpgroup_mma_wait(0, deps=[o_MD])
        mbarrier.arrive(v_empty.index(before), count=1)
        o_MD = _faded(o_MD, fade_M[:, None] + gl.zeros([_M, _D], gl.float32, mma))
        p_MN = next_MN
    last = (num_blocks - 1) % _STAGES
    o_MD = warpgroup_mma(p_MN, v_ring.index(last), o_MD, is_async=True)
    o_MD = warpgroup_mma_wait(0, deps=[o_MD])
    _put(out, q, o_MD, most_M, total_M, PART)


@gluon.jit
def _put(out, room, o_MD, most_M, total_M, PART: gl.constexpr):
    """Outputs through the queries' place in shared memory, which nothing reads any more."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _N, 16])
    o_desc, LSE, query, o_col, num_queries = out
    room.store((o_MD / total_M[:, None]).to(gl.bfloat16))
    fence_async_shared()
    _store(o_desc, [query + PART * _M, o_col], room)
    at_M = query + PART * _M + gl.arange(0, _M, gl.SliceLayout(1, mma))
    lse_M = (most_M * _SCALE + gl.log2(total_M)) * _LN2
    gl.store(LSE + at_M, lse_M, at_M < num_queries)
    tma.store_wait(0)


@gluon.jit
def _barriers():
    """Full of queries; full and empty of keys, of values; whose turn it is; of blanked values."""
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    blanked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(blanked, count=2)
    for s in gl.static_range(_STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=2)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=2)
    for part in gl.static_range(2):
        mbarrier.init(turn.index(part), count=1)
    fence_async_shared()
    return q_full, k_full, k_empty, v_full, v_empty, turn, blanked


# lengths are of every kind: a compilation for each would stall the request that brings it
@gluon.jit(do_not_specialize=["num_queries", "num_keys", "k_row", "v_row"])
def attend_kernel(
    q_desc, k_desc, v_desc, o_desc, LSE, num_queries, num_keys,
    q_head, k_head, v_head, k_row, v_row,
    H: gl.constexpr, K: gl.constexpr, CAUSAL: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Heads of a kv head side by side, kv heads one after the other: L2 holds what all read."""
    GROUP: gl.constexpr = H // K
    pid = gl.program_id(0)
    num_tiles = gl.cdiv(num_queries, 2 * _M)
    tile = (pid // GROUP) % num_tiles
    kv = pid // (GROUP * num_tiles)
    head = kv * GROUP + pid % GROUP
    if CAUSAL:
        # the longest first
        tile = num_tiles - 1 - tile
        num_blocks = tile + 1
    else:
        num_blocks = gl.cdiv(num_keys, _N)
    query = tile * 2 * _M
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_pair = gl.allocate_shared_memory(gl.bfloat16, [2, _M, _D], swizzled)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _N, _D], swizzled)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _N, _D], swizzled)
    tiles = (q_pair, k_ring, v_ring)
    bars = _barriers()
    out = (o_desc, LSE + head.to(gl.int64) * num_queries, query, head * _D, num_queries)
    blocks = (num_blocks, num_keys)
    where = (
        query, head * q_head, kv * k_row, kv * k_head, kv * v_row, kv * v_head, num_blocks
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_attend, (out, tiles, bars, blocks, 0, CAUSAL, TURNS)),
            (_attend, (out, tiles, bars, blocks, 1, CAUSAL, TURNS)),
            (_produce, (q_desc, k_desc, v_desc, tiles, bars, where)),
        ],
        [4, 1],
        [240, 24],
    )
