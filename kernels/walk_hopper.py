"""The walk of lightning attention for Hopper: bf16, head dim 128, warps specialised (Gluon).

One program walks one item (a run of tokens of one head) for one half of the value columns, in
chunks of 64 tokens: a producer warp streams q, k and v by TMA, one warpgroup carries the fp32 state
and publishes it in bf16 before each chunk, two take turns at the outputs. README.md has the
maths. Shapes: T tokens, H heads, D = 128, V = 64 value columns, C = 64 tokens of a chunk,
S state slots, I items of (first row, tokens, source slot, destination slot); slot -1 is none.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202, E741  (a jit kernel's annotations are constexpr only)
from __future__ import annotations

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

HEAD_DIM = 128
CHUNK = 64
HALF = 64
STAGES = 4
# bf16 bytes of q, k and half of v in one chunk
_CHUNK_BYTES = gl.constexpr(2 * CHUNK * (2 * HEAD_DIM + HALF))
_C = gl.constexpr(CHUNK)
_D = gl.constexpr(HEAD_DIM)
_V = gl.constexpr(HALF)
_STAGES = gl.constexpr(STAGES)
LOG2E = gl.constexpr(1.4426950408889634)

# triton 3.9 renamed these two
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _chunk_row(row, num_tokens, chunk, REVERSE: gl.constexpr):
    """First row of a full chunk; backwards the first chunk ends at the last token."""
    return row + (num_tokens - (chunk + 1) * _C if REVERSE else chunk * _C)


@gluon.jit
def _produce(q_desc, k_desc, v_desc, rings, bars, where, REVERSE: gl.constexpr):
    q_ring, k_ring, v_ring = rings
    full, empty = bars
    row, num_tokens, q_col, k_col, v_col = where
    num_full = num_tokens // _C
    for c in range(gl.cdiv(num_tokens, _C)):
        s = c % _STAGES
        mbarrier.wait(empty.index(s), ((c // _STAGES) & 1) ^ 1)
        at = _chunk_row(row, num_tokens, c, REVERSE)
        if c == num_full:
            # the partial chunk comes last in either direction; backwards it begins the item
            at = row + num_full * _C * (0 if REVERSE else 1)
        mbarrier.expect(full.index(s), _CHUNK_BYTES)
        _load(k_desc, [at, k_col], full.index(s), k_ring.index(s))
        _load(v_desc, [at, v_col], full.index(s), v_ring.index(s))
        _load(q_desc, [at, q_col], full.index(s), q_ring.index(s))


@gluon.jit
def _publish(state, s_ring, s_full, s_empty, c):
    b = c & 1
    mbarrier.wait(s_empty.index(b), ((c >> 1) & 1) ^ 1)
    s_ring.index(b).store(state)
    fence_async_shared()
    mbarrier.arrive(s_full.index(b), count=1)


@gluon.jit
def _blank_rows(tile, count, layout: gl.constexpr):
    """Zero a tile's rows from `count` on: another sequence's tokens, which may be NaN."""
    rows = gl.arange(0, _C, gl.SliceLayout(1, layout))
    kept = gl.where((rows < count)[:, None], tile.load(layout), 0.0)
    tile.store(kept.to(gl.bfloat16))


@gluon.jit
def _carry(
    SRC, DST, src, dst, src_strides, dst_strides, rings, bars, num_tokens, rate,
    REVERSE: gl.constexpr,
):  # fmt: skip
    """The state's warpgroup: S^T [V, D] = decay S^T + (decayed v)^T k, published chunk by chunk."""
    k_ring, v_ring, s_ring = rings
    full, empty, s_full, s_empty, blanked = bars
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i_D = gl.arange(0, _D, gl.SliceLayout(0, mma))
    i_V = gl.arange(0, _V, gl.SliceLayout(1, mma))
    i_C = gl.arange(0, _C, gl.SliceLayout(0, left))

    state = gl.zeros([_V, _D], gl.float32, mma)
    if src >= 0:
        at = (
            SRC
            + src * src_strides[0]
            + i_D[None, :] * src_strides[1]
            + i_V[:, None] * src_strides[2]
        )
        state = gl.load(at)
    num_full = num_tokens // _C
    if REVERSE:
        fade_C = gl.exp2(-rate * i_C.to(gl.float32))
    else:
        fade_C = gl.exp2(-rate * (_C - 1 - i_C).to(gl.float32))
    keep = gl.exp2(-rate * _C)
    for c in range(num_full):
        _publish(state.to(gl.bfloat16), s_ring, s_full, s_empty, c)
        s = c % _STAGES
        mbarrier.wait(full.index(s), (c // _STAGES) & 1)
        v_VC = v_ring.index(s).permute((1, 0)).load(left)
        v_VC = (v_VC.to(gl.float32) * fade_C[None, :]).to(gl.bfloat16)
        state = warpgroup_mma(v_VC, k_ring.index(s), state * keep, is_async=True)
        state = warpgroup_mma_wait(0, deps=[state])
        mbarrier.arrive(empty.index(s), count=1)
    rest = num_tokens - num_full * _C
    if rest > 0:
        # a few tokens do not average rounding out: the state goes out in two bf16 pieces
        high = state.to(gl.bfloat16)
        low = (state - high.to(gl.float32)).to(gl.bfloat16)
        _publish(high, s_ring, s_full, s_empty, num_full)
        _publish(low, s_ring, s_full, s_empty, num_full + 1)
        s = num_full % _STAGES
        mbarrier.wait(full.index(s), (num_full // _STAGES) & 1)
        _blank_rows(k_ring.index(s), rest, rows)
        _blank_rows(v_ring.index(s), rest, rows)
        fence_async_shared()
        mbarrier.arrive(blanked, count=1)
        left_C = i_C if REVERSE else rest - 1 - i_C
        fade_C = gl.where(i_C < rest, gl.exp2(-rate * gl.maximum(left_C, 0).to(gl.float32)), 0.0)
        v_VC = v_ring.index(s).permute((1, 0)).load(left)
        v_VC = (v_VC.to(gl.float32) * fade_C[None, :]).to(gl.bfloat16)
        state = state * gl.exp2(-rate * rest.to(gl.float32))
        state = warpgroup_mma(v_VC, k_ring.index(s), state, is_async=True)
        state = warpgroup_mma_wait(0, deps=[state])
    if dst >= 0:
        at = (
            DST
            + dst * dst_strides[0]
            + i_D[None, :] * dst_strides[1]
            + i_V[:, None] * dst_strides[2]
        )
        gl.store(at, state)


@gluon.jit
def _chunk_outputs(q, k, v, s_ring, s_bars, decays, c, is_first, PARTIAL: gl.constexpr):
    """One chunk's outputs [C, V]; frees the published state as soon as it is read.

    Where few terms make a sum (an item's first and partial chunks) the scores, and in the partial
    one the state, come in two bf16 pieces.
    """
    s_full, s_empty = s_bars
    within_CC, from_start_C = decays
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    zeros = gl.zeros([_C, _V], gl.float32, mma)
    p = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    b = c & 1
    mbarrier.wait(s_full.index(b), (c >> 1) & 1)
    o = warpgroup_mma(q, s_ring.index(b).permute((1, 0)), zeros, use_acc=False, is_async=True)
    p = warpgroup_mma_wait(1, deps=[p]) * within_CC
    high_CC = p.to(gl.bfloat16)
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(s_empty.index(b), count=1)
    if PARTIAL:
        b = (c + 1) & 1
        mbarrier.wait(s_full.index(b), ((c + 1) >> 1) & 1)
        o = warpgroup_mma(q, s_ring.index(b).permute((1, 0)), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
    o = o * from_start_C[:, None]
    if is_first:
        low_CC = (p - high_CC.to(gl.float32)).to(gl.bfloat16)
        o = warpgroup_mma(gl.convert_layout(low_CC, left), v, o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
    o = warpgroup_mma(gl.convert_layout(high_CC, left), v, o, is_async=True)
    return warpgroup_mma_wait(0, deps=[o])


@gluon.jit
def _output(
    O, o_desc, o_strides, rings, bars, where, rate,
    TURN: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    q_ring, k_ring, v_ring, s_ring, o_ring = rings
    full, empty, s_full, s_empty, blanked = bars
    row, num_tokens, o_col, o_offset = where
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    t_C = gl.arange(0, _C, gl.SliceLayout(1, mma))
    j_C = gl.arange(0, _V, gl.SliceLayout(0, mma))
    gap_CC = t_C[:, None] - j_C[None, :]
    if REVERSE:
        gap_CC = -gap_CC
        from_start_C = gl.exp2(-rate * (_C - t_C).to(gl.float32))
    else:
        from_start_C = gl.exp2(-rate * (t_C + 1).to(gl.float32))
    within_CC = gl.where(gap_CC >= 0, gl.exp2(-rate * gl.maximum(gap_CC, 0).to(gl.float32)), 0.0)
    num_full = num_tokens // _C
    for c in range(TURN, num_full, 2):
        s = c % _STAGES
        mbarrier.wait(full.index(s), (c // _STAGES) & 1)
        o = _chunk_outputs(
            q_ring.index(s), k_ring.index(s), v_ring.index(s), s_ring,
            (s_full, s_empty), (within_CC, from_start_C), c, c == 0, False)  # fmt: skip
        mbarrier.arrive(empty.index(s), count=1)
        tma.store_wait(0)
        o_tile = o_ring.index(TURN)
        o_tile.store(o.to(gl.bfloat16))
        fence_async_shared()
        _store(o_desc, [_chunk_row(row, num_tokens, c, REVERSE), o_col], o_tile)
    rest = num_tokens - num_full * _C
    if (rest > 0) & (num_full % 2 == TURN):
        s = num_full % _STAGES
        mbarrier.wait(full.index(s), (num_full // _STAGES) & 1)
        mbarrier.wait(blanked, 0)
        if REVERSE:
            from_start_C = gl.exp2(-rate * gl.maximum(rest - t_C, 0).to(gl.float32))
        o = _chunk_outputs(
            q_ring.index(s), k_ring.index(s), v_ring.index(s), s_ring,
            (s_full, s_empty), (within_CC, from_start_C), num_full, True, True)  # fmt: skip
        first = row if REVERSE else row + num_full * _C
        at = O + first.to(gl.int64) * o_strides[0] + o_offset
        gl.store(
            at + (t_C[:, None] * o_strides[0] + j_C[None, :]),
            o.to(gl.bfloat16),
            (t_C < rest)[:, None],
        )
    tma.store_wait(0)


@gluon.jit
def walk_kernel(
    q_desc, k_desc, v_desc, o_desc, O, SRC, DST, ITEM, SLOPE,
    q_head, k_head, v_head, o_token, o_head,
    src_slot, src_head, src_k, src_v, dst_slot, dst_head, dst_k, dst_v,
    H: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    pid = gl.program_id(0)
    half = pid % 2
    head = (pid // 2) % H
    item = ITEM + (pid // (2 * H)) * 4
    row = gl.load(item).to(gl.int32)
    num_tokens = gl.load(item + 1).to(gl.int32)
    src = gl.load(item + 2)
    dst = gl.load(item + 3)
    rate = gl.load(SLOPE + head) * LOG2E

    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_ring = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _C, _D], swizzled)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _C, _D], swizzled)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _C, _V], swizzled)
    s_ring = gl.allocate_shared_memory(gl.bfloat16, [2, _V, _D], swizzled)
    o_ring = gl.allocate_shared_memory(gl.bfloat16, [2, _C, _V], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    s_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    s_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    blanked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(_STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    for b in gl.static_range(2):
        mbarrier.init(s_full.index(b), count=1)
        mbarrier.init(s_empty.index(b), count=1)
    mbarrier.init(blanked, count=1)
    fence_async_shared()

    SRC += head * src_head + half * _V * src_v
    DST += head * dst_head + half * _V * dst_v
    o_col = head * o_head + half * _V
    gl.warp_specialize(
        [
            (_carry, (
                SRC, DST, src, dst, (src_slot, src_k, src_v), (dst_slot, dst_k, dst_v),
                (k_ring, v_ring, s_ring), (full, empty, s_full, s_empty, blanked),
                num_tokens, rate, REVERSE,
            )),
            (_output, (
                O, o_desc, (o_token,), (q_ring, k_ring, v_ring, s_ring, o_ring),
                (full, empty, s_full, s_empty, blanked),
                (row, num_tokens, o_col, o_col), rate, 0, REVERSE,
            )),
            (_output, (
                O, o_desc, (o_token,), (q_ring, k_ring, v_ring, s_ring, o_ring),
                (full, empty, s_full, s_empty, blanked),
                (row, num_tokens, o_col, o_col), rate, 1, REVERSE,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, (q_ring, k_ring, v_ring), (full, empty),
                (row, num_tokens, head * q_head, head * k_head, head * v_head + half * _V), REVERSE,
            )),
        ],
        [4, 4, 1],
        [152, 152, 24],
    )  # fmt: skip


def _descriptor(t_THD: Tensor, columns: int) -> TensorDescriptor:
    T, H, D = t_THD.shape
    width = (H - 1) * t_THD.stride(1) + D
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(t_THD, [T, width], [t_THD.stride(0), 1], [CHUNK, columns], layout)


def walk(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    o_THD: Tensor,
    slope_H: Tensor,
    items_I4: Tensor,
    source_SHDD: Tensor | None,
    target_SHDD: Tensor | None,
    *,
    reverse: bool = False,
) -> None:
    """Write o of the items' tokens and the states after them; see `kernels.walk.walk`."""
    H = q_THD.shape[1]
    num_programs = items_I4.shape[0] * H * 2
    source = slope_H if source_SHDD is None else source_SHDD
    target = slope_H if target_SHDD is None else target_SHDD
    walk_kernel[(num_programs,)](
        _descriptor(q_THD, HEAD_DIM),
        _descriptor(k_THD, HEAD_DIM),
        _descriptor(v_THD, HALF),
        _descriptor(o_THD, HALF),
        o_THD,
        source,
        target,
        items_I4,
        slope_H,
        q_THD.stride(1),
        k_THD.stride(1),
        v_THD.stride(1),
        o_THD.stride(0),
        o_THD.stride(1),
        *((0,) * 4 if source_SHDD is None else source_SHDD.stride()),
        *((0,) * 4 if target_SHDD is None else target_SHDD.stride()),
        H=H,
        REVERSE=reverse,
        num_warps=4,
        # said, because triton 3.9 warns where its default is taken
        enable_fp_fusion=True,
    )


def fits(*tensors_THD: Tensor) -> bool:
    """Whether TMA can read these: bf16, head dim 128, 16-byte steps, on a Hopper GPU."""
    return all(
        t.is_cuda
        and torch.cuda.get_device_capability(t.device)[0] == 9
        and t.dtype == torch.bfloat16
        and t.shape[2] == HEAD_DIM
        and t.shape[0] > 0
        and t.stride(2) == 1
        and t.data_ptr() % 16 == 0
        and t.stride(0) % 8 == 0
        and t.stride(1) % 8 == 0
        and t.stride(0) > 0
        and t.stride(1) > 0
        for t in tensors_THD
    )
