"""The walk of lightning attention in Triton for any GPU, and the first pass over segments.

A walk reads an item's tokens in chunks with the state on chip; backwards it reads them from the
last to the first, and all else is the same. README.md has the maths.
Shapes: T tokens, H heads, D head dim, S state slots. Tables are int64 and slot -1 is none: I items
of (row, tokens, source slot, target slot); R runs of (row, tokens, segment that starts with it,
tokens from its end to the next segment, tokens that the state before it fades by); G chains of
(first run, last run, source slot, final segment).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202, E741  (a jit kernel's annotations are constexpr only)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
# exp(-17) = 4e-8: what a state keeps of a token that far back is below fp32 rounding
FORGOTTEN = 17.0
CUT = tl.constexpr(FORGOTTEN)


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _split_dot(a, b, BF16: tl.constexpr, PRECISION: tl.constexpr):
    """a in fp32 times b; where b is bf16, a goes in as two bf16 pieces."""
    if BF16:
        high = a.to(tl.bfloat16)
        low = (a - high.to(tl.float32)).to(tl.bfloat16)
        c = tl.dot(low, b) + tl.dot(high, b)
    else:
        c = tl.dot(a, b, input_precision=PRECISION)
    return c


@triton.jit
def _loss(x):
    """1 - exp(-x) to full fp32 precision, x >= 0."""
    series = x * (1 - x / 2 * (1 - x / 3 * (1 - x / 4 * (1 - x / 5))))
    return tl.where(x < 0.25, series, 1 - tl.exp2(-x * LOG2E))


@triton.jit
def _tile(P, head_offset, rows, stride, cols, keep, BF16: tl.constexpr):
    """[rows, cols] of one head; rows not kept are 0 whatever memory holds there."""
    tile = tl.load(P + head_offset + rows[:, None] * stride + cols[None, :], keep[:, None], 0.0)
    if not BF16:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def walk_kernel(
    Q, K, V, O, SRC, DST, ITEM, SLOPE,
    q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head,
    src_slot, src_head, src_k, src_v, dst_slot, dst_head, dst_k, dst_v,
    H: tl.constexpr, D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
    BF16: tl.constexpr, PRECISION: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    column = (pid % (D // BLOCK_V)) * BLOCK_V
    head = ((pid // (D // BLOCK_V)) % H).to(tl.int64)
    item = ITEM + (pid // (D // BLOCK_V * H)) * 4
    row = tl.load(item)
    num_tokens = tl.load(item + 1).to(tl.int32)
    src = tl.load(item + 2)
    dst = tl.load(item + 3)
    slope = tl.load(SLOPE + head)
    rate = slope * LOG2E
    i_D = tl.arange(0, D)
    i_V = column + tl.arange(0, BLOCK_V)
    i_T = tl.arange(0, BLOCK_T)
    gap_TT = (i_T[:, None] - i_T[None, :]).to(tl.float32)
    within_TT = tl.where(gap_TT >= 0, tl.exp2(-rate * tl.maximum(gap_TT, 0.0)), 0.0)
    from_start_T = tl.exp2(-rate * (i_T + 1).to(tl.float32))

    state = tl.zeros([D, BLOCK_V], dtype=tl.float32)
    if src >= 0:
        at = SRC + src * src_slot + head * src_head
        state = tl.load(at + i_D[:, None] * src_k + i_V[None, :] * src_v)
    for c in range(0, tl.cdiv(num_tokens, BLOCK_T)):
        place_T = c * BLOCK_T + i_T
        real_T = place_T < num_tokens
        rows_T = row + ((num_tokens - 1 - place_T) if REVERSE else place_T)
        q = _tile(Q, head * q_head, rows_T, q_token, i_D, real_T, BF16)
        k = _tile(K, head * k_head, rows_T, k_token, i_D, real_T, BF16)
        v = _tile(V, head * v_head, rows_T, v_token, i_V, real_T, BF16)
        p = _dot(q, tl.trans(k), PRECISION) * within_TT
        # the state goes in twice bf16's bits as well: transposed, it is the left operand
        inter = tl.trans(_split_dot(tl.trans(state), tl.trans(q), BF16, PRECISION))
        o = inter * from_start_T[:, None] + _split_dot(p, v, BF16, PRECISION)
        at = O + head * o_head + rows_T[:, None] * o_token + i_V[None, :]
        tl.store(at, o.to(O.dtype.element_ty), mask=real_T[:, None])
        count = tl.minimum(num_tokens - c * BLOCK_T, BLOCK_T)
        left_T = tl.maximum(count - 1 - i_T, 0).to(tl.float32)
        faded = v.to(tl.float32) * tl.exp2(-rate * left_T)[:, None]
        added = _dot(tl.trans(k), faded.to(k.dtype), PRECISION)
        # not state * exp(-s n): one rounded factor, taken thousands of times, drifts
        state += added - state * _loss(slope * count.to(tl.float32))
    if dst >= 0:
        at = DST + dst * dst_slot + head * dst_head
        tl.store(at + i_D[:, None] * dst_k + i_V[None, :] * dst_v, state)


@triton.jit
def run_kernel(
    K, V, LOCAL, RUN, SLOPE, k_token, k_head, v_token, v_head,
    H: tl.constexpr, D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
    BF16: tl.constexpr, PRECISION: tl.constexpr, REVERSE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a run alone adds to the state: sum of decayed k v^T, fp32 [D, BLOCK_V].

    A head that forgets all of the run before the next segment writes nothing, and none is read.
    """
    pid = tl.program_id(0)
    column = (pid % (D // BLOCK_V)) * BLOCK_V
    head = ((pid // (D // BLOCK_V)) % H).to(tl.int64)
    index = pid // (D // BLOCK_V * H)
    row = tl.load(RUN + index * 5)
    num_tokens = tl.load(RUN + index * 5 + 1).to(tl.int32)
    ahead = tl.load(RUN + index * 5 + 3).to(tl.int32)
    slope = tl.load(SLOPE + head)
    rate = slope * LOG2E
    i_D = tl.arange(0, D)
    i_V = column + tl.arange(0, BLOCK_V)
    i_T = tl.arange(0, BLOCK_T)
    fade_T = tl.exp2(-rate * (BLOCK_T - 1 - i_T).to(tl.float32))
    loss = _loss(slope * BLOCK_T)
    window = tl.minimum(CUT / slope + 1.0, 1.0e9).to(tl.int32)
    if window <= ahead:
        return
    skipped = tl.maximum(num_tokens - (window - ahead), 0) // BLOCK_T
    if REVERSE:
        rows_T = row + num_tokens - 1 - i_T - skipped * BLOCK_T
        step = -BLOCK_T
    else:
        rows_T = row + i_T + skipped * BLOCK_T
        step = BLOCK_T
    k_at = K + head * k_head + rows_T[:, None] * k_token + i_D[None, :]
    v_at = V + head * v_head + rows_T[:, None] * v_token + i_V[None, :]
    state = tl.zeros([D, BLOCK_V], dtype=tl.float32)
    for _ in tl.range(skipped, num_tokens // BLOCK_T, num_stages=STAGES):
        k = tl.load(k_at)
        v = tl.load(v_at)
        if not BF16:
            k = k.to(tl.float32)
        faded = v.to(tl.float32) * fade_T[:, None]
        if BF16:
            state = tl.dot(tl.trans(k), faded.to(k.dtype), state * (1 - loss))
        else:
            state += _dot(tl.trans(k), faded, PRECISION) - state * loss
        k_at += tl.cast(step, tl.int64) * k_token
        v_at += tl.cast(step, tl.int64) * v_token
    at = LOCAL + (index.to(tl.int64) * H + head) * D * D
    tl.store(at + i_D[:, None] * D + i_V[None, :], state)


@triton.jit
def _run_state(LOCAL, RUN, j, last, within, window, H: tl.constexpr, D: tl.constexpr):
    """A run's fade, the segment it starts (or -1), and its own state; past the last, nothing."""
    run = tl.cast(j, tl.int64)
    is_run = run < last
    segment = tl.load(RUN + run * 5 + 2, is_run, -1)
    ahead = tl.load(RUN + run * 5 + 3, is_run, 0)
    fade = tl.load(RUN + run * 5 + 4, is_run, 0)
    num_read = tl.where(is_run & (ahead < window), H * D * D, 0)
    return fade, segment, tl.load(LOCAL + run * (H * D * D) + within, within < num_read, 0.0)


@triton.jit
def _pass_run(START, state, fade, segment, local, rate, within, H: tl.constexpr, D: tl.constexpr):
    num_written = tl.where(segment >= 0, H * D * D, 0)
    tl.store(START + segment * (H * D * D) + within, state, within < num_written)
    return state * tl.exp2(-rate * fade.to(tl.float32)) + local


@triton.jit
def chain_kernel(
    LOCAL, START, SRC, RUN, CHAIN, SLOPE, src_slot, src_head, src_k, src_v,
    H: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Carry a piece's state over its runs and write it where segments start."""
    i_D = tl.arange(0, D)
    i_K = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    head = tl.program_id(1).to(tl.int64)
    chain = CHAIN + tl.program_id(2) * 4
    first = tl.load(chain)
    last = tl.load(chain + 1)
    src = tl.load(chain + 2)
    slope = tl.load(SLOPE + head)
    rate = slope * LOG2E
    window = tl.minimum(CUT / slope + 1.0, 1.0e9).to(tl.int32)
    within = head * D * D + i_K[:, None] * D + i_D[None, :]
    state = tl.zeros([BLOCK_K, D], dtype=tl.float32)
    if src >= 0:
        at = SRC + src * src_slot + head * src_head
        state = tl.load(at + i_K[:, None] * src_k + i_D[None, :] * src_v)
    # four at a time, so that their loads are under way together
    for j in range(first, last, 4):
        fade_0, segment_0, local_0 = _run_state(LOCAL, RUN, j, last, within, window, H, D)
        fade_1, segment_1, local_1 = _run_state(LOCAL, RUN, j + 1, last, within, window, H, D)
        fade_2, segment_2, local_2 = _run_state(LOCAL, RUN, j + 2, last, within, window, H, D)
        fade_3, segment_3, local_3 = _run_state(LOCAL, RUN, j + 3, last, within, window, H, D)
        state = _pass_run(START, state, fade_0, segment_0, local_0, rate, within, H, D)
        state = _pass_run(START, state, fade_1, segment_1, local_1, rate, within, H, D)
        state = _pass_run(START, state, fade_2, segment_2, local_2, rate, within, H, D)
        state = _pass_run(START, state, fade_3, segment_3, local_3, rate, within, H, D)
    tl.store(START + tl.load(chain + 3) * (H * D * D) + within, state)


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
    """Write o [T, H, D] of the items' tokens and, in their target slots, the states after them."""
    _, H, D = q_THD.shape
    block_t, block_v = walk_tile(q_THD.dtype, D)
    walk_kernel[(items_I4.shape[0] * H * (D // block_v),)](
        q_THD, k_THD, v_THD, o_THD,
        slope_H if source_SHDD is None else source_SHDD,
        slope_H if target_SHDD is None else target_SHDD,
        items_I4, slope_H,
        *(s for t in (q_THD, k_THD, v_THD, o_THD) for s in t.stride()[:2]),
        *pool_strides(source_SHDD), *pool_strides(target_SHDD),
        H=H, D=D, BLOCK_V=block_v, BLOCK_T=block_t, REVERSE=reverse, num_warps=8,
        enable_fp_fusion=True, **arithmetic(q_THD.dtype),
    )  # fmt: skip


def walk_tile(dtype: torch.dtype, head_dim: int) -> tuple[int, int]:
    """Tokens and value columns that 8 warps hold in registers."""
    return (32, min(head_dim, 64)) if dtype == torch.bfloat16 else (16, 32)


def segment_starts(
    k_THD: Tensor,
    v_THD: Tensor,
    slope_H: Tensor,
    runs_R5: Tensor,
    chains_G4: Tensor,
    num_segments: int,
    source_SHDD: Tensor | None,
    *,
    reverse: bool = False,
) -> Tensor:
    """fp32 states [segments, H, D, D] before the chains' segments; others are left unwritten."""
    _, H, D = k_THD.shape
    num_runs = runs_R5.shape[0]
    shape = (num_runs + num_segments, H, D, D)
    states = torch.empty(shape, dtype=torch.float32, device=k_THD.device)
    local, start = states[:num_runs], states[num_runs:]
    is_bf16 = k_THD.dtype == torch.bfloat16
    block_v = D if is_bf16 else min(D, 64)
    if num_runs:
        run_kernel[(num_runs * H * (D // block_v),)](
            k_THD, v_THD, local, runs_R5, slope_H, *k_THD.stride()[:2], *v_THD.stride()[:2],
            H=H, D=D, BLOCK_V=block_v, BLOCK_T=64 if is_bf16 else 32, REVERSE=reverse,
            STAGES=3 if is_bf16 else 1, num_warps=8 if block_v == 128 else 4,
            enable_fp_fusion=True, **arithmetic(k_THD.dtype),
        )  # fmt: skip
    chain_kernel[(D // 8, H, chains_G4.shape[0])](
        local, start, slope_H if source_SHDD is None else source_SHDD, runs_R5, chains_G4, slope_H,
        *pool_strides(source_SHDD), H=H, D=D, BLOCK_K=8, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return start


def pool_strides(pool_SHDD: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if pool_SHDD is None else pool_SHDD.stride()


def arithmetic(dtype: torch.dtype) -> dict[str, bool | str]:
    """fp16 tiles are multiplied in tf32, which holds them exactly and does not overflow."""
    return {
        "BF16": dtype == torch.bfloat16,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }
