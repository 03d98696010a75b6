"""Repetition early stop: the count, and what it makes of forced and masked tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.engine import generation
from m1serve.engine.outbox import Outbox, Outlet
from m1serve.engine.stopping import Stop, StopRules, ThinkBudget
from m1serve.engine.token_ids import TokenIds
from m1serve.types import (
    GenerateRequest,
    Limits,
    RepetitionStop,
    Sampling,
    StopCause,
    TokenFlag,
)

TOK = byte_tokenizer()


def naive_stop(logprobs: Sequence[float | None], repetition: RepetitionStop) -> int | None:
    """Tokens said when it stops: the last `num_tokens` sampled ones all had p > P."""
    for end in range(1, len(logprobs) + 1):
        sampled = [p for p in logprobs[:end] if p is not None]
        run = sampled[-repetition.num_tokens :]
        is_long = len(run) == repetition.num_tokens
        if is_long and all(p > math.log(repetition.probability) for p in run):
            return end
    return None


def limits(repetition: RepetitionStop | None, max_tokens: int = 100, **more: Any) -> Limits:
    return Limits(max_tokens=max_tokens, repetition=repetition, **more)


def rules(repetition: RepetitionStop | None, **fields: Any) -> StopRules:
    fields.setdefault("limits", limits(repetition, 10_000))
    request = GenerateRequest(id="r", prompt_ids=(5, 6), **fields)
    return StopRules(request, tokenizer=TOK, max_model_len=20_000)


# ---- the count -----------------------------------------------------------------------------------


@given(
    probabilities=st.lists(
        st.none() | st.sampled_from([0.9, 0.98, 0.989, 0.991, 0.9999, 1.0, 1.0]), max_size=60
    ),
    repetition=st.builds(
        RepetitionStop,
        num_tokens=st.integers(1, 8),
        probability=st.sampled_from([0.5, 0.97, 0.99, 0.9999]),
    ),
)
@example([1.0, 1.0, 0.5, 1.0, 1.0, 1.0], RepetitionStop(num_tokens=3))
@example([1.0, None, 1.0, None, None, 1.0], RepetitionStop(num_tokens=3))
@example([None] * 9, RepetitionStop(num_tokens=1))
def test_it_stops_where_the_naive_count_does(
    probabilities: list[float | None], repetition: RepetitionStop
) -> None:
    logprobs = [None if p is None else math.log(p) for p in probabilities]
    rule, stopped = rules(repetition), None
    for num, logprob in enumerate(logprobs, start=1):
        if (stop := rule.after(7, num, logprob)) is not None:
            assert stop == Stop(cause=StopCause.REPETITION, detail=str(repetition.num_tokens))
            stopped = num
            break
    assert stopped == naive_stop(logprobs, repetition)


def test_a_probability_of_exactly_the_threshold_breaks_the_run() -> None:
    rule = rules(RepetitionStop(num_tokens=2, probability=0.5))
    said = [math.log(0.5), math.log(0.6), math.log(0.5), math.log(0.6), math.log(0.6)]
    stops = [rule.after(7, num, p) for num, p in enumerate(said, start=1)]
    assert [stop is not None for stop in stops] == [False] * 4 + [True]


def test_the_default_is_the_papers() -> None:
    rule = rules(Limits(max_tokens=1).repetition)
    stops = [rule.after(7, num, -0.01) for num in range(1, 3001)]
    assert stops[:-1] == [None] * 2999
    assert stops[-1] == Stop(cause=StopCause.REPETITION, detail="3000")


def test_switched_off_nothing_is_counted() -> None:
    rule = rules(None)
    assert [rule.after(7, num, 0.0) for num in range(1, 4000)] == [None] * 3999


def test_a_row_without_numbers_is_no_certainty() -> None:
    rule = rules(RepetitionStop(num_tokens=1))
    assert rule.after(7, 1, math.nan) is None


def test_what_ends_by_itself_did_not_end_by_repetition() -> None:
    once = RepetitionStop(num_tokens=1)
    asked = Sampling(stop_token_ids=(9,))
    assert rules(once).after(TOK.eos_id, 1, 0.0) == Stop(cause=StopCause.EOS)
    by_token = rules(once, sampling=asked).after(9, 1, 0.0)
    assert by_token == Stop(cause=StopCause.STOP_TOKEN, detail="9")
    by_string = rules(once, stop_strings=("a",)).after(TOK.encode_text("a")[0], 1, 0.0)
    assert by_string == Stop(cause=StopCause.STOP_STRING, detail="a")


def test_at_the_last_token_of_the_limit_the_repetition_is_named() -> None:
    rule = rules(None, limits=limits(RepetitionStop(num_tokens=2), max_tokens=2))
    assert rule.after(7, 1, 0.0) is None
    assert rule.after(7, 2, 0.0) == Stop(cause=StopCause.REPETITION, detail="2")


# ---- a choice of the local engine ----------------------------------------------------------------


class Masking:
    """A grammar's constraint that has just excluded something."""

    forced: tuple[int, ...] = ()
    is_masking = True

    def observe(self, token_id: int) -> None:
        """It goes on masking."""


async def choice(request: GenerateRequest, **fields: Any) -> generation.Sequence:
    budget = request.limits.reasoning_budget
    prompt = TokenIds.of(request.prompt_ids)
    return generation.Sequence(
        generation=generation.Generation(
            request=request,
            prompt=prompt,
            outlet=Outlet(Outbox(), asyncio.get_running_loop()),
            order=0,
        ),
        unread=prompt,
        choice=0,
        rules=StopRules(request, tokenizer=TOK, max_model_len=1000),
        budget=(
            None
            if budget is None
            else ThinkBudget(budget, tokenizer=TOK, prompt_ids=request.prompt_ids)
        ),
        rng=None,
        **fields,
    )


async def test_a_closed_think_block_neither_counts_nor_breaks_the_run() -> None:
    closing = TOK.encode_control("</think>\n")
    request = GenerateRequest(
        id="r",
        prompt_ids=tuple(TOK.encode_control("a<think>\n")),
        limits=limits(RepetitionStop(num_tokens=5), reasoning_budget=3),
    )
    sequence = await choice(request)
    for _ in range(3):
        sequence.take(7, 0.0)
    for token_id in closing:
        assert sequence.forced[0] == token_id
        sequence.take(token_id, -20.0)
    sequence.take(7, 0.0)
    assert sequence.stop is None
    sequence.take(7, 0.0)
    assert sequence.stop == Stop(cause=StopCause.REPETITION, detail="5")
    flags = sequence.next_delta("v@0").token_flags
    assert flags == (1,) * 3 + (2,) * len(closing) + (1,) * 2


async def test_a_token_under_a_grammar_counts_by_the_models_own_probability() -> None:
    request = GenerateRequest(id="r", prompt_ids=(5,), limits=limits(RepetitionStop(num_tokens=3)))
    sequence = await choice(request, constraint=Masking())
    for logprob in (0.0, 0.0, -5.0, 0.0, 0.0):
        sequence.take(7, logprob)
        assert sequence.stop is None
    sequence.take(7, 0.0)
    assert sequence.stop == Stop(cause=StopCause.REPETITION, detail="3")
    assert set(sequence.next_delta("v@0").token_flags) == {TokenFlag.SAMPLED | TokenFlag.MASKED}


async def test_a_preempted_choice_goes_on_counting() -> None:
    request = GenerateRequest(id="r", prompt_ids=(5,), limits=limits(RepetitionStop(num_tokens=4)))
    sequence = await choice(request)
    for num in range(4):
        assert sequence.stop is None
        sequence.rewind()
        assert len(sequence.unread) == 1 + num
        sequence.take(7, 0.0)
    assert sequence.stop == Stop(cause=StopCause.REPETITION, detail="4")
