"""The thinking budget in every engine: split deltas, several choices, a swap in mid-thought."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from m1serve.types import Delta, InFlight, Limits, TokenFlag, VersionRef

StartRig = Callable[..., Awaitable[Any]]
Versions = tuple[VersionRef, VersionRef]


def thinking(rig: Any) -> tuple[int, ...]:
    """A prompt that has opened the block."""
    return (*rig.prompt(), *rig.tok.encode_control("<think>\n"))


@pytest.mark.parametrize("interval_s", [0.0, math.inf])
@pytest.mark.parametrize("budget", [0, 1, 9])
async def test_each_choice_has_a_budget_of_its_own(
    start: StartRig, budget: int, interval_s: float
) -> None:
    rig = await start()
    closing = rig.tok.encode_control("</think>\n")
    said = await rig.say(
        prompt_ids=thinking(rig),
        n=3,
        limits=Limits(max_tokens=24, reasoning_budget=budget),
        min_delta_interval_s=interval_s,
    )
    end = budget + len(closing)
    for choice in range(3):
        ids, flags = said.ids(choice), said.flags(choice)
        assert (len(ids), list(ids[budget:end])) == (24, closing)
        assert flags[budget:end] == (TokenFlag.FORCED.value,) * len(closing)
        assert set(flags[:budget] + flags[end:]) == {TokenFlag.SAMPLED.value}


async def test_a_forced_token_has_the_models_own_logprob(start: StartRig) -> None:
    rig = await start()
    prompt = thinking(rig)
    said = await rig.say(
        prompt_ids=prompt, limits=Limits(max_tokens=16, reasoning_budget=6), top_logprobs=2
    )
    assert TokenFlag.FORCED.value in said.flags()
    scored = await rig.engine.score((*prompt, *said.ids()))
    assert said.logprobs() == pytest.approx(scored.logprobs[-16:], abs=1e-5)


async def test_a_swap_in_mid_thought_does_not_lengthen_it(
    start: StartRig, versions: Versions
) -> None:
    rig = await start()
    request = rig.request(
        prompt_ids=thinking(rig),
        limits=Limits(max_tokens=90, reasoning_budget=60),
        in_flight=InFlight.RECOMPUTE,
        min_delta_interval_s=0.0,
    )
    items, deltas = rig.open(request), list[Delta]()
    await anext(items)
    async for delta in items:
        deltas.append(delta)
        if len(deltas) == 1:
            await rig.engine.load(versions[1])
    flags = [flag for delta in deltas for flag in delta.token_flags]
    spoken = [delta.weights_version for delta in deltas for _ in delta.token_ids]
    assert set(spoken[:60]) == {"tiny@0", "tiny@1"}
    assert flags.index(TokenFlag.FORCED) == 60
    assert flags.count(TokenFlag.FORCED) == len(rig.tok.encode_control("</think>\n"))
    assert len(flags) == 90
