"""Repetition early stop in every engine: same count, deltas, swaps, forced and masked tokens."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.engine.local import LocalEngine
from m1serve.engine.staging import Staged
from m1serve.errors import RequestError
from m1serve.model.weights import load_version
from m1serve.types import (
    Delta,
    Grammar,
    InFlight,
    Limits,
    RepetitionStop,
    Sampling,
    StopCause,
    TokenFlag,
    VersionRef,
)

StartRig = Callable[..., Awaitable[Any]]
Versions = tuple[VersionRef, VersionRef]

ANY = RepetitionStop(num_tokens=60, probability=0.0)
"""Every sampled token counts."""


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


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
@pytest.mark.parametrize("probability", [0.001, 0.3])
async def test_an_engine_stops_where_its_own_logprobs_say(
    start: StartRig, num_tokens: int, probability: float
) -> None:
    rig, repetition = await start(), RepetitionStop(num_tokens=num_tokens, probability=probability)
    alone = await rig.say(limits=limits(None, 120), n=3)
    said = await rig.say(limits=limits(repetition, 120), n=3)
    for index in range(3):
        logprobs, place = alone.logprobs(index), naive_stop(alone.logprobs(index), repetition)
        assert said.ids(index) == alone.ids(index)[:place]
        assert said.logprobs(index) == pytest.approx(logprobs[:place], abs=1e-5)
        wanted = (
            (StopCause.LENGTH, None)
            if place is None
            else (
                StopCause.REPETITION,
                str(num_tokens),
            )
        )
        assert (said.stop(index), said.detail(index)) == wanted


async def test_the_count_is_of_a_choice_and_not_of_its_deltas(start: StartRig) -> None:
    rig = await start()
    for interval_s in (0.0, math.inf):
        said = await rig.say(limits=limits(ANY), min_delta_interval_s=interval_s, n=2)
        assert [len(said.ids(i)) for i in range(2)] == [60, 60]
        assert {said.stop(i) for i in range(2)} == {StopCause.REPETITION}


async def test_a_swap_that_recomputes_goes_on_counting(start: StartRig, versions: Versions) -> None:
    rig = await start()
    request = rig.request(
        limits=limits(ANY), in_flight=InFlight.RECOMPUTE, min_delta_interval_s=0.0
    )
    items, deltas = rig.open(request), list[Delta]()
    await anext(items)
    async for delta in items:
        deltas.append(delta)
        if len(deltas) == 1:
            await rig.engine.load(versions[1])
    spoken = [delta.weights_version for delta in deltas for _ in delta.token_ids]
    assert (len(spoken), set(spoken)) == (60, {"tiny@0", "tiny@1"})
    assert deltas[-1].stop is StopCause.REPETITION


async def test_forced_tokens_are_not_counted_by_any_engine(start: StartRig) -> None:
    rig = await start()
    prompt = (*rig.prompt(), *rig.tok.encode_control("<think>\n"))
    closing = rig.tok.encode_control("</think>\n")
    said = await rig.say(prompt_ids=prompt, limits=limits(ANY, reasoning_budget=4))
    assert said.stop() is StopCause.REPETITION
    assert len(said.ids()) == 60 + len(closing)
    assert said.flags().count(TokenFlag.FORCED) == len(closing)


async def test_a_grammar_does_not_hide_a_run(local: StartRig) -> None:
    rig = await local()
    no_thought = ((rig.tok.control_ids["<think>"], -100.0),)
    asked = {
        "grammar": Grammar(text='start: "{" /[a-z ]{90}/ "}"\n'),
        "sampling": Sampling(seed=3, logit_bias=no_thought),
    }
    repetition = RepetitionStop(num_tokens=3, probability=0.001)
    alone = await rig.say(limits=limits(None, 40), **asked)
    assert all(flag & TokenFlag.MASKED for flag in alone.flags())
    place = naive_stop(alone.logprobs(), repetition)
    assert place is not None
    said = await rig.say(limits=limits(repetition, 40), **asked)
    assert (said.ids(), said.stop()) == (alone.ids()[:place], StopCause.REPETITION)


@pytest.mark.parametrize(
    ("repetition", "param"),
    [
        (RepetitionStop(num_tokens=0), "repetition_stop_tokens"),
        (RepetitionStop(num_tokens=-3), "repetition_stop_tokens"),
        (RepetitionStop(probability=1.0), "repetition_stop_probability"),
        (RepetitionStop(probability=-0.1), "repetition_stop_probability"),
        (RepetitionStop(probability=math.nan), "repetition_stop_probability"),
    ],
)
async def test_a_stop_that_could_never_come_is_refused(
    start: StartRig, repetition: RepetitionStop, param: str
) -> None:
    rig = await start()
    with pytest.raises(RequestError, match="repetition stop of") as refused:
        await rig.say(limits=limits(repetition))
    assert refused.value.param == param
    assert (await rig.say(max_tokens=3)).stop() is StopCause.LENGTH


# ---- a model that is sure of itself --------------------------------------------------------------


def sure_engine(versions: Versions, tok: ChatTokenizer, settings: Any) -> LocalEngine:
    """Random weights whose head shouts: nearly every draw has p > 0.99."""
    model, _ = load_version(Path(versions[0].path))
    with torch.no_grad():
        model.lm_head.weight.mul_(100_000.0)
        # their logits are 0, below the most likely token's: they are never said
        model.lm_head.weight[tok.eos_id] = 0.0
        model.lm_head.weight[tok.vocab_size :] = 0.0
    staged = Staged(
        model=model.requires_grad_(False),
        weights_version="tiny@0",
        phases_ms={},
        parity_mean=0.0,
        parity_max=0.0,
    )
    return LocalEngine(staged, settings=settings, tokenizer=tok)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_model_that_repeats_itself_is_stopped_at_the_papers_probability(
    make_rig: Any, temperature: float
) -> None:
    rig = make_rig(sure_engine)
    sampling = Sampling(temperature=temperature, seed=1)
    alone = await rig.say(limits=limits(None, 150), sampling=sampling)
    assert alone.stop() is StopCause.LENGTH
    repetition = RepetitionStop(num_tokens=40, probability=0.99)
    place = naive_stop(alone.logprobs(), repetition)
    assert place is not None
    said = await rig.say(limits=limits(repetition, 150), sampling=sampling)
    assert (said.ids(), said.stop()) == (alone.ids()[:place], StopCause.REPETITION)
    other = await rig.say(limits=limits(RepetitionStop(num_tokens=41), 40), sampling=sampling)
    assert (other.ids(), other.stop()) == (alone.ids()[:40], StopCause.LENGTH)
