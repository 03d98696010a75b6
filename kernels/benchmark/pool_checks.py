"""What prefill reads from the state pool and leaves in it: carried states, snapshots, free slots.

Shapes: T tokens, N sequences, H heads, D head dim, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from m1serve.kernels.benchmark.checks import BARS, CheckCase, Setting, later
from m1serve.kernels.benchmark.inputs import (
    Answer,
    Sequences,
    answer_error,
    exact_answer,
    largest_difference,
    worst,
    worst_error,
)
from m1serve.kernels.lightning import Snapshot, lightning_prefill

NAN = float("nan")
SPLITS = (1, 129, 1, 300, 69)
LENGTHS = (65, 300, 63)
# sequence, tokens, slot
MARKS = ((0, 64, 1), (1, 1, 3), (1, 64, 4), (1, 299, 6), (2, 63, 7))


def pool_checks(setting: Setting) -> Iterator[CheckCase]:
    yield from split_checks(setting)
    for dtype, bar in BARS.items():
        sequences = later(setting, LENGTHS, 0, dtype, True)
        for name, run, allowed in (
            ("slots that are not written keep their bits", _foreign_slots, 0.0),
            ("NaN in free slots and in slots to be written is not read", _free_slots_error, bar),
            ("snapshots are the states of the prefixes", _snapshot_error, bar),
        ):
            yield CheckCase(
                op="prefill", case=name, dtype=dtype, bar=allowed, run=partial(run, sequences)
            )


def split_checks(setting: Setting) -> Iterator[CheckCase]:
    """A sequence in pieces, its state carried in one slot of the pool, equals one pass."""
    for dtype, bar in BARS.items():
        for layer in setting.layers:
            sequences = later(setting, [sum(SPLITS)], layer, dtype, True)

            def run(sequences: Callable[[], Sequences] = sequences) -> float:
                whole = sequences()
                return answer_error(_in_pieces(whole), exact_answer(whole), whole.cu_seqlens)

            case = f"pieces of {'+'.join(map(str, SPLITS))} layer {layer}"
            yield CheckCase(op="prefill", case=case, dtype=dtype, bar=bar, run=run)


def _in_pieces(whole: Sequences) -> Answer:
    assert whole.state_NHDD is not None
    pool_SHDD = torch.full(
        (3, *whole.state_NHDD.shape[1:]), float("nan"), device=whole.q_THD.device
    )
    pool_SHDD[1] = whole.state_NHDD[0]
    outputs, start = [], 0
    for length in SPLITS:
        piece = slice(start, start + length)
        outputs.append(
            lightning_prefill(
                whole.q_THD[piece],
                whole.k_THD[piece],
                whole.v_THD[piece],
                whole.slope_H,
                cu_seqlens=[0, length],
                pool_SHDD=pool_SHDD,
                initial_slots=[1],
                final_slots=[1],
            )
        )
        start += length
    return Answer(torch.cat(outputs), pool_SHDD[1:2])


def _into_pool(given: Sequences, pool_SHDD: Tensor) -> Tensor:
    """Three sequences: one continues in its slot, one starts at zero, one's state is dropped."""
    out_THD = torch.full(given.q_THD.shape, NAN, dtype=given.q_THD.dtype, device=given.q_THD.device)
    return lightning_prefill(
        given.q_THD,
        given.k_THD,
        given.v_THD,
        given.slope_H,
        cu_seqlens=given.cu_seqlens,
        pool_SHDD=pool_SHDD,
        initial_slots=[2, -1, 5],
        final_slots=[2, 0, -1],
        out_THD=out_THD,
    )


def _pool(given: Sequences) -> Tensor:
    """Eight slots of NaN, but for the two that are read."""
    assert given.state_NHDD is not None
    pool_SHDD = torch.full((8, *given.state_NHDD.shape[1:]), NAN, device=given.q_THD.device)
    pool_SHDD[2], pool_SHDD[5] = given.state_NHDD[0], given.state_NHDD[2]
    return pool_SHDD


def _foreign_slots(sequences: Callable[[], Sequences]) -> float:
    given = sequences()
    pool_SHDD = _pool(given)
    before_SHDD = pool_SHDD.clone()
    _into_pool(given, pool_SHDD)
    kept = [1, 3, 4, 5, 6, 7]
    return largest_difference(pool_SHDD[kept], before_SHDD[kept])


def _free_slots_error(sequences: Callable[[], Sequences]) -> float:
    given = sequences()
    pool_SHDD = _pool(given)
    o_THD = _into_pool(given, pool_SHDD)
    wanted = exact_answer(_second_from_zero(given))
    errors = [worst_error(o_THD[s], wanted.o_THD[s], head_dim=1) for s in given.spans]
    errors += [
        worst_error(pool_SHDD[slot], wanted.state_NHDD[n], head_dim=0)
        for n, slot in ((0, 2), (1, 0))
    ]
    return worst(errors)


def _snapshot_error(sequences: Callable[[], Sequences]) -> float:
    """Of each snapshot, and of the outputs that go on behind it."""
    given = sequences()
    pool_SHDD = _pool(given)
    o_THD = lightning_prefill(
        given.q_THD,
        given.k_THD,
        given.v_THD,
        given.slope_H,
        cu_seqlens=given.cu_seqlens,
        pool_SHDD=pool_SHDD,
        initial_slots=[2, -1, 5],
        final_slots=[2, 0, -1],
        snapshots=[Snapshot(*mark) for mark in MARKS],
    )
    wanted = exact_answer(_second_from_zero(given))
    errors = [worst_error(o_THD[s], wanted.o_THD[s], head_dim=1) for s in given.spans]
    for n, num_tokens, slot in MARKS:
        prefix = _second_from_zero(given).only(n)
        prefix = replace(
            prefix,
            q_THD=prefix.q_THD[:num_tokens],
            k_THD=prefix.k_THD[:num_tokens],
            v_THD=prefix.v_THD[:num_tokens],
            cu_seqlens=[0, num_tokens],
        )
        exact = exact_answer(prefix).state_NHDD[0]
        errors.append(worst_error(pool_SHDD[slot], exact, head_dim=0))
    return worst(errors)


def _second_from_zero(given: Sequences) -> Sequences:
    assert given.state_NHDD is not None
    state_NHDD = given.state_NHDD.clone()
    state_NHDD[1] = 0
    return replace(given, state_NHDD=state_NHDD)
