"""The walk of lightning attention for Hopper: bf16, head dim 128, warps specialised (Gluon).

One program walks one item (a run of tokens of one head) in chunks of 64 tokens, for all V = 128
value columns or for 64 of them. A producer warp streams q, k and v by TMA; a warpgroup for each 64
columns carries the fp32 state and publishes it in bf16 before each chunk; the others, one when V is
128 and two in turns when it is 64, compute and store outputs. README.md has the maths.
Shapes: T tokens, H heads, D = 128, C = 64 tokens of a chunk, P = 64 columns of a state's
warpgroup, S state slots, I items of (first row, tokens, source slot, target slot); -1 is none.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202, E741  (a jit kernel's annotations are constexpr only)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

HEAD_DIM = 128
CHUNK = 64
_C = gl.constexpr(CHUNK)
_D = gl.constexpr(HEAD_DIM)
_P = gl.constexpr(64)
LOG2E = gl.constexpr(1.4426950408889634)

# Gluon's names up to triton 3.8, and from 3.9 on
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _chunk_row(row, num_tokens, chunk, REVERSE: gl.constexpr):
    """First row of a full chunk; backwards the first chunk ends at the last token."""
    return row + (num_tokens - (chunk + 1) * _C if REVERSE else chunk * _C)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, rings, bars, where,
    V: gl.constexpr, STAGES: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    q_ring, k_ring, v_ring = rings
    full, empty, _, _, _ = bars
    row, num_tokens, q_col, k_col, v_col = where
    num_full = num_tokens // _C
    for c in range(gl.cdiv(num_tokens, _C)):
        s = c % STAGES
        mbarrier.wait(empty.index(s), ((c // STAGES) & 1) ^ 1)
        at = _chunk_row(row, num_tokens, c, REVERSE)
        if c == num_full:
            # the partial chunk comes last in either direction; backwards it begins the item
            at = row + num_full * _C * (0 if REVERSE else 1)
        mbarrier.expect(full.index(s), 2 * _C * (2 * _D + V))
        _load(k_desc, [at, k_col], full.index(s), k_ring.index(s))
        _load(v_desc, [at, v_col], full.index(s), v_ring.index(s))
        _load(q_desc, [at, q_col], full.index(s), q_ring.index(s))


@gluon.jit
def _publish(state, s_ring, s_full, s_empty, c, PART: gl.constexpr):
    b = c & 1
    mbarrier.wait(s_empty.index(b), ((c >> 1) & 1) ^ 1)
    s_ring.index(b).slice(PART * _P, _P, 0).store(state)
    fence_async_shared()
    mbarrier.arrive(s_full.index(b), count=1)


@gluon.jit
def _blank_rows(tile, count):
    """Zero a tile's rows from `count` on: another sequence's tokens, which may be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, _C, gl.SliceLayout(1, layout))
    kept = gl.where((rows < count)[:, None], tile.load(layout), 0.0)
    tile.store(kept.to(gl.bfloat16))


@gluon.jit
def _add(state, k, v, fade_C, left: gl.constexpr):
    """state [P, D] += (faded v)^T k."""
    v_PC = v.permute((1, 0)).load(left)
    v_PC = (v_PC.to(gl.float32) * fade_C[None, :]).to(gl.bfloat16)
    state = warpgroup_mma(v_PC, k, state, is_async=True)
    return warpgroup_mma_wait(0, deps=[state])


@gluon.jit
def _slot(POOL, slot, strides, i_D, i_P):
    return POOL + slot * strides[0] + i_D[None, :] * strides[1] + i_P[:, None] * strides[2]


@gluon.jit
def _carry(
    ends, rings, bars, num_tokens, rate,
    PART: gl.constexpr, STAGES: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """A state's warpgroup: S^T [P, D] = decay S^T + (decayed v)^T k, published chunk by chunk."""
    SRC, DST, src, dst, src_strides, dst_strides = ends
    k_ring, v_ring, s_ring = rings
    full, empty, s_full, s_empty, blanked = bars
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    i_D = gl.arange(0, _D, gl.SliceLayout(0, mma))
    i_P = PART * _P + gl.arange(0, _P, gl.SliceLayout(1, mma))
    i_C = gl.arange(0, _C, gl.SliceLayout(0, left))

    state = gl.zeros([_P, _D], gl.float32, mma)
    if src >= 0:
        state = gl.load(_slot(SRC, src, src_strides, i_D, i_P))
    num_full = num_tokens // _C
    fade_C = gl.exp2(-rate * (i_C if REVERSE else _C - 1 - i_C).to(gl.float32))
    keep = gl.exp2(-rate * _C)
    for c in range(num_full):
        _publish(state.to(gl.bfloat16), s_ring, s_full, s_empty, c, PART)
        s = c % STAGES
        mbarrier.wait(full.index(s), (c // STAGES) & 1)
        v = v_ring.index(s).slice(PART * _P, _P, 1)
        state = _add(state * keep, k_ring.index(s), v, fade_C, left)
        mbarrier.arrive(empty.index(s), count=1)
    rest = num_tokens - num_full * _C
    if rest > 0:
        _publish(state.to(gl.bfloat16), s_ring, s_full, s_empty, num_full, PART)
        s = num_full % STAGES
        mbarrier.wait(full.index(s), (num_full // STAGES) & 1)
        v = v_ring.index(s).slice(PART * _P, _P, 1)
        if PART == 0:
            _blank_rows(k_ring.index(s), rest)
        _blank_rows(v, rest)
        fence_async_shared()
        mbarrier.arrive(blanked, count=1)
        mbarrier.wait(blanked, 0)
        ago_C = i_C if REVERSE else rest - 1 - i_C
        fade_C = gl.where(i_C < rest, gl.exp2(-rate * gl.maximum(ago_C, 0).to(gl.float32)), 0.0)
        state = state * gl.exp2(-rate * rest.to(gl.float32))
        state = _add(state, k_ring.index(s), v, fade_C, left)
    if dst >= 0:
        gl.store(_slot(DST, dst, dst_strides, i_D, i_P), state)


@gluon.jit
def _chunk_outputs(q, k, v, s_ring, s_bars, decays, c, is_exact, V: gl.constexpr):
    """One chunk's outputs [C, V]; frees the published state as soon as it is read.

    Where few terms make a sum, rounding does not average out: `is_exact` takes the scores in two
    bf16 pieces.
    """
    s_full, s_empty = s_bars
    within_CC, from_start_C = decays
    p_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, o_mma, 2)
    p = gl.zeros([_C, _C], gl.float32, p_mma)
    p = warpgroup_mma(q, k.permute((1, 0)), p, use_acc=False, is_async=True)
    b = c & 1
    mbarrier.wait(s_full.index(b), (c >> 1) & 1)
    o = gl.zeros([_C, V], gl.float32, o_mma)
    o = warpgroup_mma(q, s_ring.index(b).permute((1, 0)), o, use_acc=False, is_async=True)
    p = warpgroup_mma_wait(1, deps=[p]) * within_CC
    high_CC = p.to(gl.bfloat16)
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(s_empty.index(b), count=1)
    o = o * from_start_C[:, None]
    if is_exact:
        low_CC = (p - high_CC.to(gl.float32)).to(gl.bfloat16)
        o = warpgroup_mma(gl.convert_layout(low_CC, left), v, o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
    o = warpgroup_mma(gl.convert_layout(high_CC, left), v, o, is_async=True)
    return warpgroup_mma_wait(0, deps=[o])


@gluon.jit
def _output(
    out, rings, bars, rate,
    TURN: gl.constexpr, TURNS: gl.constexpr,
    V: gl.constexpr, STAGES: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    O, o_desc, o_token, row, num_tokens, o_col = out
    q_ring, k_ring, v_ring, s_ring, o_ring = rings
    full, empty, s_full, s_empty, blanked = bars
    s_bars = (s_full, s_empty)
    p_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    gap_CC = gl.arange(0, _C, gl.SliceLayout(1, p_mma))[:, None]
    gap_CC = gap_CC - gl.arange(0, _C, gl.SliceLayout(0, p_mma))[None, :]
    gap_CC = (-gap_CC if REVERSE else gap_CC).to(gl.float32)
    within_CC = gl.where(gap_CC >= 0, gl.exp2(-rate * gl.maximum(gap_CC, 0.0)), 0.0)
    t_C = gl.arange(0, _C, gl.SliceLayout(1, o_mma))
    from_start_C = gl.exp2(-rate * (_C - t_C if REVERSE else t_C + 1).to(gl.float32))
    num_full = num_tokens // _C
    o_tile = o_ring.index(TURN)
    for c in range(TURN, num_full, TURNS):
        s = c % STAGES
        mbarrier.wait(full.index(s), (c // STAGES) & 1)
        o = _chunk_outputs(
            q_ring.index(s), k_ring.index(s), v_ring.index(s), s_ring, s_bars,
            (within_CC, from_start_C), c, c == 0, V,
        )  # fmt: skip
        mbarrier.arrive(empty.index(s), count=1)
        tma.store_wait(0)
        o_tile.store(o.to(gl.bfloat16))
        fence_async_shared()
        _store(o_desc, [_chunk_row(row, num_tokens, c, REVERSE), o_col], o_tile)
    rest = num_tokens - num_full * _C
    if (rest > 0) & (num_full % TURNS == TURN):
        s = num_full % STAGES
        mbarrier.wait(full.index(s), (num_full // STAGES) & 1)
        mbarrier.wait(blanked, 0)
        if REVERSE:
            from_start_C = gl.exp2(-rate * gl.maximum(rest - t_C, 0).to(gl.float32))
        o = _chunk_outputs(
            q_ring.index(s), k_ring.index(s), v_ring.index(s), s_ring, s_bars,
            (within_CC, from_start_C), num_full, True, V,
        )  # fmt: skip
        first = row if REVERSE else row + num_full * _C
        at = O + first.to(gl.int64) * o_token + o_col
        at = at + (t_C[:, None] * o_token + gl.arange(0, V, gl.SliceLayout(0, o_mma))[None, :])
        gl.store(at, o.to(gl.bfloat16), (t_C < rest)[:, None])
    tma.store_wait(0)


@gluon.jit
def _tiles(V: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr):
    """Shared memory: rings of q, k and v, two published states, an output a turn."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _C, _D], swizzled)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _C, _D], swizzled)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _C, V], swizzled)
    s_ring = gl.allocate_shared_memory(gl.bfloat16, [2, V, _D], swizzled)
    o_ring = gl.allocate_shared_memory(gl.bfloat16, [TURNS, _C, V], swizzled)
    return q_ring, k_ring, v_ring, s_ring, o_ring


@gluon.jit
def _barriers(STAGES: gl.constexpr, PARTS: gl.constexpr):
    """Of the rings, full and empty; of the published states, full and empty; of a blanked chunk."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    s_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    s_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    blanked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=PARTS + 1)
    for b in gl.static_range(2):
        mbarrier.init(s_full.index(b), count=PARTS)
        mbarrier.init(s_empty.index(b), count=1)
    mbarrier.init(blanked, count=PARTS)
    fence_async_shared()
    return full, empty, s_full, s_empty, blanked


@gluon.jit
def walk_kernel(
    q_desc, k_desc, v_desc, o_desc, O, SRC, DST, ITEM, SLOPE,
    q_head, k_head, v_head, o_token, o_head,
    src_slot, src_head, src_k, src_v, dst_slot, dst_head, dst_k, dst_v,
    H: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = V // 64
    TURNS: gl.constexpr = 3 - PARTS
    COLUMNS: gl.constexpr = 128 // V
    pid = gl.program_id(0)
    column = (pid % COLUMNS) * V
    head = (pid // COLUMNS) % H
    item = ITEM + (pid // (COLUMNS * H)) * 4
    row = gl.load(item).to(gl.int32)
    num_tokens = gl.load(item + 1).to(gl.int32)
    src = gl.load(item + 2)
    dst = gl.load(item + 3)
    rate = gl.load(SLOPE + head) * LOG2E

    tiles = _tiles(V, STAGES, TURNS)
    q_ring, k_ring, v_ring, s_ring, _ = tiles
    bars = _barriers(STAGES, PARTS)

    SRC += head * src_head + column * src_v
    DST += head * dst_head + column * dst_v
    loads = (q_ring, k_ring, v_ring)
    starts = (row, num_tokens, head * q_head, head * k_head, head * v_head + column)
    states = (k_ring, v_ring, s_ring)
    ends = (SRC, DST, src, dst, (src_slot, src_k, src_v), (dst_slot, dst_k, dst_v))
    out = (O, o_desc, o_token, row, num_tokens, head * o_head + column)
    if PARTS == 2:
        gl.warp_specialize(
            [
                (_carry, (ends, states, bars, num_tokens, rate, 0, STAGES, REVERSE)),
                (_carry, (ends, states, bars, num_tokens, rate, 1, STAGES, REVERSE)),
                (_output, (out, tiles, bars, rate, 0, 1, V, STAGES, REVERSE)),
                (_produce, (q_desc, k_desc, v_desc, loads, bars, starts, V, STAGES, REVERSE)),
            ],
            [4, 4, 1],
            [144, 200, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_carry, (ends, states, bars, num_tokens, rate, 0, STAGES, REVERSE)),
                (_output, (out, tiles, bars, rate, 0, 2, V, STAGES, REVERSE)),
                (_output, (out, tiles, bars, rate, 1, 2, V, STAGES, REVERSE)),
                (_produce, (q_desc, k_desc, v_desc, loads, bars, starts, V, STAGES, REVERSE)),
            ],
            [4, 4, 1],
            [152, 152, 24],
        )
