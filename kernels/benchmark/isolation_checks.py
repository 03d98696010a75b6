"""What must not depend on what lies beside it, to the bit: neighbours, order, free slots, reruns.

Shapes: T tokens, N sequences, H heads, D head dim, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from m1serve.kernels.benchmark.checks import BARS, CheckCase, Setting, gradients
from m1serve.kernels.benchmark.inputs import (
    Answer,
    Sequences,
    largest_difference,
    random_sequences,
    worst,
    worst_error,
)
from m1serve.kernels.benchmark.ours import M1serve

DTYPE = torch.bfloat16
NAN = float("nan")
LENGTHS = (65, 100, 1, 63, 300)
SPOILT = 1
ORDER = (3, 1, 4, 0, 2)


def isolation_checks(setting: Setting) -> Iterator[CheckCase]:
    differences: list[tuple[str, str, Callable[[Setting], float]]] = [
        ("prefill", "NaN beyond the last token changes no bit", _beyond_the_end),
        ("prefill", "a neighbour of NaN changes no bit", _spoilt_neighbour),
        ("prefill", "other neighbours change no bit", _other_neighbours),
        ("prefill", "the order of sequences changes no bit", _order),
        ("prefill", "a second run gives the same bits", _second_run),
        ("backward", "a neighbour of NaN changes no bit", _spoilt_neighbour_backward),
        ("backward", "the order of sequences changes no bit", _order_backward),
        ("backward", "a second run gives the same bits", _second_run_backward),
    ]
    for op, name, run in differences:
        yield CheckCase(op=op, case=name, dtype=DTYPE, bar=0.0, run=partial(run, setting))
    yield CheckCase(
        op="prefill",
        case="a sequence alone and among others agree",
        dtype=DTYPE,
        bar=BARS[DTYPE],
        run=partial(_alone_error, setting),
    )


def _packed(setting: Setting, lengths: Sequence[int] = LENGTHS) -> Sequences:
    return random_sequences(lengths, setting.slopes(0), dtype=DTYPE, is_continued=True, seed=3)


def _runs(setting: Setting) -> list[Sequences]:
    """Ragged, and a long sequence: of all heads, and of the eight of one GPU."""
    found = [_packed(setting), _packed(setting, [max(setting.lengths)])]
    if setting.is_large:
        found.append(_packed(replace(setting, heads=slice(56, 64)), [20_000]))
    return found


def _answer(given: Sequences) -> Answer:
    return M1serve().prefill(given)()


def _answer_difference(got: Answer, wanted: Answer) -> float:
    return max(
        largest_difference(got.o_THD, wanted.o_THD),
        largest_difference(got.state_NHDD, wanted.state_NHDD),
    )


def _beyond_the_end(setting: Setting) -> float:
    """The tensors end with the sequence, the memory behind them goes on: zeros or NaN."""
    differences = []
    for length in (1, 63, 65, 300):
        both = []
        for tail in (0.0, NAN):
            whole = _packed(setting, [length, 130])
            for t_THD in (whole.q_THD, whole.k_THD, whole.v_THD):
                t_THD[length:] = tail
            both.append(_answer(whole.only(0)))
        differences.append(_answer_difference(both[1], both[0]))
    return max(differences)


def _spoilt(setting: Setting) -> Sequences:
    """The same sequences with NaN in every token of one, and in its initial state."""
    given = _packed(setting)
    assert given.state_NHDD is not None
    for t_THD in (given.q_THD, given.k_THD, given.v_THD):
        t_THD[given.spans[SPOILT]] = NAN
    given.state_NHDD[SPOILT] = NAN
    return given


def _others(given: Sequences, got_THD: Tensor) -> Tensor:
    """The tokens of all sequences but the spoilt one."""
    spans = [span for n, span in enumerate(given.spans) if n != SPOILT]
    return torch.cat([got_THD[span] for span in spans])


def _without(t_NHDD: Tensor) -> Tensor:
    return torch.cat([t_NHDD[:SPOILT], t_NHDD[SPOILT + 1 :]])


def _spoilt_neighbour(setting: Setting) -> float:
    given = _packed(setting)
    got, wanted = _answer(_spoilt(setting)), _answer(given)
    return max(
        largest_difference(_others(given, got.o_THD), _others(given, wanted.o_THD)),
        largest_difference(_without(got.state_NHDD), _without(wanted.state_NHDD)),
    )


def _other_neighbours(setting: Setting) -> float:
    """The same sequence between others of the same lengths."""
    given, other = _packed(setting), _packed(setting)
    keep, span = 3, given.spans[3]
    for t_THD in (other.q_THD, other.k_THD, other.v_THD):
        t_THD[: span.start] *= -2
        t_THD[span.stop :] *= 3
    got, wanted = _answer(other), _answer(given)
    return max(
        largest_difference(got.o_THD[span], wanted.o_THD[span]),
        largest_difference(got.state_NHDD[keep], wanted.state_NHDD[keep]),
    )


def _turned(given: Sequences) -> Sequences:
    assert given.state_NHDD is not None
    spans = [given.spans[n] for n in ORDER]
    q, k, v = (
        torch.cat([t[span] for span in spans]) for t in (given.q_THD, given.k_THD, given.v_THD)
    )
    bounds = [0]
    for span in spans:
        bounds.append(bounds[-1] + span.stop - span.start)
    state_NHDD = given.state_NHDD[list(ORDER)]
    return replace(given, q_THD=q, k_THD=k, v_THD=v, cu_seqlens=bounds, state_NHDD=state_NHDD)


def _back(turned: Sequences, t_THD: Tensor) -> Tensor:
    """Tokens of turned sequences in the first order."""
    return torch.cat([t_THD[turned.spans[ORDER.index(n)]] for n in range(len(ORDER))])


def _order(setting: Setting) -> float:
    given = _turned(_packed(setting))
    turned = _turned(given)
    got, wanted = _answer(turned), _answer(given)
    return max(
        largest_difference(_back(turned, got.o_THD), wanted.o_THD),
        largest_difference(got.state_NHDD, wanted.state_NHDD[list(ORDER)]),
    )


def _second_run(setting: Setting) -> float:
    return max(_answer_difference(_answer(given), _answer(given)) for given in _runs(setting))


def _second_run_backward(setting: Setting) -> float:
    return max(
        largest_difference(again, once)
        for given in _runs(setting)
        for again, once in zip(gradients(given), gradients(given), strict=True)
    )


def _spoilt_neighbour_backward(setting: Setting) -> float:
    given = _packed(setting)
    spoilt, clean = gradients(_spoilt(setting)), gradients(given)
    pairs = zip(spoilt[:3], clean[:3], strict=True)
    differences = [largest_difference(_others(given, a), _others(given, b)) for a, b in pairs]
    return max(*differences, largest_difference(_without(spoilt[3]), _without(clean[3])))


def _order_backward(setting: Setting) -> float:
    """Incoming gradients of ones, since drawn ones would belong to other tokens."""
    given = _turned(_packed(setting))
    turned = _turned(given)
    got, wanted = gradients(turned, is_drawn=False), gradients(given, is_drawn=False)
    pairs = zip(got[:3], wanted[:3], strict=True)
    differences = [largest_difference(_back(turned, a), b) for a, b in pairs]
    return max(*differences, largest_difference(got[3], wanted[3][list(ORDER)]))


def _alone_error(setting: Setting) -> float:
    given = _packed(setting)
    together = _answer(given)
    errors = []
    for n, span in enumerate(given.spans):
        alone = _answer(given.only(n))
        errors.append(worst_error(together.o_THD[span], alone.o_THD, head_dim=1))
        errors.append(worst_error(together.state_NHDD[n], alone.state_NHDD[0], head_dim=0))
    return worst(errors)
