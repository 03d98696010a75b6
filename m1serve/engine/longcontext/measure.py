"""The measurements themselves: reading a prompt, a decode step at a context, a snapshot."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from m1serve.engine.longcontext.clock import Clock
from m1serve.engine.longcontext.rig import Rig
from m1serve.engine.longcontext.shares import Share, device_shares
from m1serve.engine.prefix_cache import Space
from m1serve.engine.sampler import Drawn
from m1serve.engine.token_ids import TokenIds
from m1serve.kernels.moe import route
from m1serve.model.footprint import footprint
from m1serve.model.moe import SparseMoE

_TIMED_STEPS, _WARM_STEPS = 20, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    tokens: int
    chunk_tokens: int
    seconds: float
    tokens_per_s: float
    peak_gib: float | None
    shares: tuple[Share, ...]
    """Of a second run, under the profiler; empty where there is no GPU"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    context: int
    batch: int
    vocab_size: int
    has_graph: bool
    ms: float
    """A step of many, as the engine makes them: logits, the most probable token to the host, and
    the step that reads it, while which runs the host asks for the next one"""
    ms_from_rest: float
    """The same with the device idle before and after"""
    ms_hidden: float
    """The step alone, from rest"""
    experts_touched: float
    """Of a layer, on average"""
    min_bytes: int
    """What a step must move: touched experts, other weights, keys, values, states twice"""
    context_is_made_up: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCost:
    tokens: int
    read_seconds: float
    take_ms: float
    find_ms: float
    restore_ms: float
    speedup: float
    """Of finding and restoring over reading again"""
    num_bytes: int
    """States of one snapshot; its pages are shared"""


def measure_prefill(rig: Rig, num_tokens: int, *, chunk_tokens: int, has_shares: bool) -> Prefill:
    """From an empty row, after an unmeasured run of the first two chunks."""
    clock, id_T = Clock(rig.device), rig.random_ids(num_tokens)
    chunk_tokens = min(chunk_tokens, num_tokens)
    read = partial(rig.read, 0, id_T, chunk_tokens=chunk_tokens)
    rig.pool.clear(0)
    rig.read(0, id_T[: 2 * chunk_tokens], chunk_tokens=chunk_tokens)
    rig.pool.clear(0)
    clock.forget_peak()
    seconds = clock.seconds(read)
    peak_gib = clock.peak_gib()
    rig.pool.clear(0)
    shares = device_shares(read, rig.model) if has_shares and rig.device.type == "cuda" else []
    rig.clear()
    return Prefill(
        tokens=num_tokens,
        chunk_tokens=chunk_tokens,
        seconds=seconds,
        tokens_per_s=num_tokens / seconds,
        peak_gib=peak_gib,
        shares=tuple(shares),
    )


def measure_decode(rig: Rig, *, context: int, batch: int) -> Decode:
    """Rows of a made-up context; a graph where there is a GPU."""
    clock, is_cuda = Clock(rig.device), rig.device.type == "cuda"
    rig.make_up(batch, context, room=8 * (_TIMED_STEPS + _WARM_STEPS))
    step = rig.decode_step(with_graphs=is_cuda)
    token_N = rig.random_ids(batch)
    touched = _experts_touched(rig, token_N)

    def whole() -> None:
        best = rig.model.logits(rig.pool.last_RE[:batch]).max(-1)
        drawn = Drawn(token_N=best.indices, logprob_N=best.values)
        copy = drawn.start_copy()
        step.run(drawn.token_N)
        copy.wait()

    with torch.inference_mode():
        ms_from_rest = _median_ms(clock, whole)
        ms = _in_a_row_ms(clock, whole)
        ms_hidden = _median_ms(clock, partial(step.run, token_N))
    rig.clear()
    return Decode(
        context=context,
        batch=batch,
        vocab_size=rig.model.config.vocab_size,
        has_graph=is_cuda,
        ms=ms,
        ms_from_rest=ms_from_rest,
        ms_hidden=ms_hidden,
        experts_touched=touched,
        min_bytes=_step_bytes(rig, touched, batch, context),
    )


def measure_snapshot(rig: Rig, num_tokens: int, *, chunk_tokens: int) -> SnapshotCost:
    """A turn's end: taken, found again by its ids, restored into another row."""
    clock, space = Clock(rig.device), Space(weights_version="bench@0", salt="")
    id_T = rig.random_ids(num_tokens)
    rig.clear()
    read_s = clock.seconds(partial(rig.read, 0, id_T, chunk_tokens=chunk_tokens))
    ids, cache = TokenIds.of(id_T.tolist()), rig.memory.snapshots
    longer = ids.extended([1, 2, 3])
    taken = []
    take_s = clock.seconds(lambda: taken.append(rig.pool.snapshot(0, num_tokens)))
    (snapshot,) = taken
    cache.put(space, ids, snapshot)
    snapshot.release()
    found = []
    find_s = clock.seconds(lambda: found.append(cache.find(space, longer)))
    (hit,) = found
    if hit is None:
        raise MemoryError("the snapshot was not kept: engine.snapshot_bytes is too small for it")
    if not rig.pool.restore(1, hit):
        raise MemoryError("no page for the restored row's own last one: give it more memory")
    restore_s = statistics.median(
        clock.seconds(partial(rig.pool.restore, 1, hit)) for _ in range(5)
    )
    state_bytes = hit.state_bytes
    cache.drop_version("bench@0")
    rig.clear()
    return SnapshotCost(
        tokens=num_tokens,
        read_seconds=read_s,
        take_ms=take_s * 1e3,
        find_ms=find_s * 1e3,
        restore_ms=restore_s * 1e3,
        speedup=read_s / (find_s + restore_s),
        num_bytes=state_bytes,
    )


def _in_a_row_ms(clock: Clock, call: Callable[[], None]) -> float:
    """Of one call among others."""

    def many() -> None:
        for _ in range(_TIMED_STEPS):
            call()

    return statistics.median(clock.seconds(many) for _ in range(3)) / _TIMED_STEPS * 1e3


def _median_ms(clock: Clock, call: Callable[[], object]) -> float:
    for _ in range(_WARM_STEPS):
        call()
    return statistics.median(clock.seconds(call) for _ in range(_TIMED_STEPS)) * 1e3


@torch.inference_mode()
def _experts_touched(rig: Rig, token_N: Tensor) -> float:
    """Distinct experts a layer in one eager step of these rows."""
    counts: list[int] = []

    def count(moe: nn.Module, given: tuple[Any, ...]) -> None:
        assert isinstance(moe, SparseMoE)
        routes = route(given[0].flatten(0, -2), moe.gate.weight, moe.num_chosen)
        counts.append(len(set(routes.chosen_NP.flatten().tolist())))

    handles = [b.block_sparse_moe.register_forward_pre_hook(count) for b in rig.model.blocks]
    rig.decode_step(with_graphs=False).run(token_N)
    for handle in handles:
        handle.remove()
    return statistics.mean(counts)


def _step_bytes(rig: Rig, touched: float, batch: int, context: int) -> int:
    config, size = rig.model.config, rig.model.embed_tokens.weight.element_size()
    sizes = footprint(config, weight_itemsize=size, kv_itemsize=size)
    expert_bytes = 3 * config.hidden_size * config.intermediate_size * size
    layers, E = config.num_hidden_layers, config.hidden_size
    all_experts = layers * config.num_local_experts * expert_bytes
    embedding = config.vocab_size * E * size
    dense = sizes.weight_bytes - all_experts - embedding
    per_row = 2 * sizes.state_bytes + context * sizes.kv_token_bytes
    return int(dense + layers * touched * expert_bytes + batch * per_row)
