"""The Engine contract, the same for every implementation."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from m1serve.errors import OverloadedError, RequestError
from m1serve.types import (
    Delta,
    EngineStats,
    Grammar,
    InFlight,
    Limits,
    Sampling,
    Started,
    StopCause,
    TokenFlag,
    VersionRef,
)

StartRig = Callable[..., Awaitable[Any]]

LONG = 150
ENDLESS = 2000
"""More than a test waits for."""


async def first(items: AsyncIterator[Started | Delta]) -> Started:
    item = await anext(items)
    assert isinstance(item, Started)
    return item


async def rest(items: AsyncIterator[Started | Delta]) -> list[Delta]:
    return [item async for item in items if isinstance(item, Delta)]


async def until(rig: Any, is_true: Callable[[EngineStats], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not is_true(await rig.stats()):  # noqa: ASYNC110 - stats have no event
            await asyncio.sleep(0.005)


async def test_started_comes_first_with_the_version(start: StartRig) -> None:
    rig = await start()
    items = rig.open(rig.request(prompt_ids=rig.prompt("Never asked before")))
    started = await first(items)
    assert started.weights_version == rig.engine.weights_version == "tiny@0"
    assert started.cached_tokens == 0
    assert started.prompt_logprobs is None
    await items.aclose()


async def test_all_streams_of_a_turn_are_equally_long(start: StartRig) -> None:
    rig = await start()
    said = await rig.say(max_tokens=9, min_delta_interval_s=0.0, top_logprobs=3)
    for delta in said.deltas[0]:
        lengths = {len(delta.token_ids), len(delta.logprobs), len(delta.token_flags)}
        lengths |= {len(delta.top_logprobs), len(delta.sampled_logprobs or ())}
        assert len(lengths) == 1
        assert all(len(row) == 3 for row in delta.top_logprobs)
    assert len(said.ids()) == 9
    assert set(said.flags()) == {TokenFlag.SAMPLED.value}
    assert all(-math.inf < logprob <= 0 for logprob in said.logprobs())


async def test_only_the_last_delta_of_a_choice_has_a_stop(start: StartRig) -> None:
    rig = await start()
    said = await rig.say(n=3, min_delta_interval_s=0.0)
    assert set(said.deltas) == {0, 1, 2}
    for deltas in said.deltas.values():
        assert [delta.stop for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].stop is StopCause.LENGTH


async def test_max_tokens_stops_with_length(start: StartRig) -> None:
    rig = await start()
    said = await rig.say(max_tokens=5)
    assert (len(said.ids()), said.stop()) == (5, StopCause.LENGTH)


async def test_the_context_limit_stops_with_context(start: StartRig) -> None:
    rig = await start()
    said = await rig.say(max_tokens=10_000)
    room = rig.engine.capabilities.max_model_len - len(rig.prompt())
    assert said.stop() is StopCause.CONTEXT
    assert len(said.ids()) == room


async def test_the_end_of_sentence_is_kept_and_stops(start: StartRig) -> None:
    rig = await start(max_model_len=512)
    likely = Sampling(logit_bias=((rig.tok.eos_id, 100.0),))
    said = await rig.say(max_tokens=400, sampling=likely)
    assert said.stop() is StopCause.EOS
    assert said.ids()[-1] == rig.tok.eos_id
    assert rig.tok.eos_id not in said.ids()[:-1]


async def test_a_stop_token_is_kept_and_stops(start: StartRig) -> None:
    rig = await start()
    free = (await rig.say(max_tokens=10)).ids()
    stop_id = free[4]
    sampling = Sampling(seed=7, logit_bias=rig.long_winded.logit_bias, stop_token_ids=(stop_id,))
    said = await rig.say(max_tokens=10, sampling=sampling)
    assert said.ids() == free[: free.index(stop_id) + 1]
    assert (said.stop(), said.detail()) == (StopCause.STOP_TOKEN, str(stop_id))


async def test_a_stop_string_ends_at_the_token_that_completes_it(start: StartRig) -> None:
    rig = await start()
    free = (await rig.say(max_tokens=40)).ids()
    at = next(i for i in range(3, 40) if _is_plain(rig.tok.decode(free[i : i + 2])))
    string = rig.tok.decode(free[at : at + 2])
    said = await rig.say(max_tokens=40, stop_strings=(string, "never said"))
    text = rig.tok.decode(said.ids())
    assert (said.stop(), said.detail()) == (StopCause.STOP_STRING, string)
    assert string in text
    assert string not in rig.tok.decode(said.ids()[:-1])
    assert said.ids() == free[: len(said.ids())]


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and len(text) >= 2


async def test_a_seed_means_the_same_tokens_again(start: StartRig) -> None:
    rig = await start()
    alone = await rig.say(max_tokens=20)
    again, three = await asyncio.gather(rig.say(max_tokens=20), rig.say(max_tokens=20, n=3))
    assert again.ids() == three.ids(0) == alone.ids()


async def test_coalescing_changes_the_deltas_and_not_the_tokens(start: StartRig) -> None:
    rig = await start()
    fine = await rig.say(max_tokens=30, n=2, min_delta_interval_s=0.0)
    some = await rig.say(max_tokens=30, n=2, min_delta_interval_s=0.01)
    whole = await rig.say(max_tokens=30, n=2, min_delta_interval_s=math.inf)
    for choice in (0, 1):
        assert fine.ids(choice) == some.ids(choice) == whole.ids(choice)
        assert len(whole.deltas[choice]) == 1
        assert len(fine.deltas[choice]) == 30


async def test_scoring_agrees_with_generation(start: StartRig) -> None:
    rig = await start()
    said = await rig.say(max_tokens=30)
    ids = (*rig.prompt(), *said.ids())
    scored = await rig.engine.score(ids)
    assert scored.weights_version == "tiny@0"
    assert len(scored.logprobs) == len(ids) - 1
    assert scored.logprobs[-30:] == pytest.approx(said.logprobs(), abs=1e-5)
    again = await rig.say(max_tokens=1, prompt_logprobs=True)
    in_prompt = len(rig.prompt()) - 1
    assert again.started.prompt_logprobs == pytest.approx(scored.logprobs[:in_prompt], abs=1e-5)


async def test_a_request_may_ask_for_no_tokens_at_all(start: StartRig) -> None:
    rig = await start()
    said = await rig.say(max_tokens=0, prompt_logprobs=True)
    assert (said.ids(), said.stop()) == ((), StopCause.LENGTH)
    assert said.started.prompt_logprobs is not None


async def test_abort_ends_the_stream_and_frees_the_slot(start: StartRig) -> None:
    rig = await start(max_model_len=2048)
    request = rig.request(max_tokens=ENDLESS, n=2)
    items = rig.open(request)
    await first(items)
    await rig.engine.abort(request.id)
    deltas = await rest(items)
    assert {delta.choice for delta in deltas if delta.stop is StopCause.ABORT} == {0, 1}
    assert sum(len(delta.token_ids) for delta in deltas) < 2 * ENDLESS
    await until(rig, lambda stats: stats.num_running == 0)


async def test_a_waiting_request_can_be_aborted(start: StartRig) -> None:
    rig = await start(max_model_len=2048, num_slots=1)
    busy = rig.open(rig.request(max_tokens=ENDLESS))
    await first(busy)
    request = rig.request()
    waiting = asyncio.create_task(rest(rig.open(request)))
    await asyncio.sleep(0.02)
    await rig.engine.abort(request.id)
    assert [delta.stop for delta in await waiting] == [StopCause.ABORT]
    await busy.aclose()


async def test_unknown_ids_can_be_aborted(start: StartRig) -> None:
    rig = await start()
    await rig.engine.abort("nobody")
    assert (await rig.say(max_tokens=2)).stop() is StopCause.LENGTH


async def test_closing_the_stream_aborts_the_request(start: StartRig) -> None:
    rig = await start(max_model_len=2048, num_slots=1)
    items = rig.open(rig.request(max_tokens=ENDLESS))
    await first(items)
    await items.aclose()
    await until(rig, lambda stats: stats.num_running == 0)
    assert len((await rig.say(max_tokens=3)).ids()) == 3


async def test_a_deadline_aborts(start: StartRig) -> None:
    rig = await start()
    limits = Limits(max_tokens=LONG, deadline_s=0.0)
    said = await rig.say(limits=limits)
    assert (said.stop(), said.detail()) == (StopCause.ABORT, "deadline")


async def test_load_leaves_running_requests_on_their_version(
    start: StartRig, versions: tuple[VersionRef, VersionRef]
) -> None:
    rig = await start()
    alone = await rig.say(max_tokens=LONG)
    items = rig.open(rig.request(max_tokens=LONG))
    assert (await first(items)).weights_version == "tiny@0"
    report = await rig.engine.load(versions[1])
    assert report.is_accepted, report.reason
    assert report.weights_version == rig.engine.weights_version == "tiny@1"
    assert {"stage", "verify", "switch"} <= set(report.phases_ms)
    new = await rig.say(max_tokens=LONG)
    old = await rest(items)
    assert tuple(i for delta in old for i in delta.token_ids) == alone.ids()
    assert {delta.weights_version for delta in old} == {"tiny@0"}
    assert new.started.weights_version == "tiny@1"
    assert set(new.versions()) == {"tiny@1"}
    await until(rig, lambda stats: stats.versions == ("tiny@1",))


async def test_recompute_goes_on_with_the_new_weights(
    start: StartRig, versions: tuple[VersionRef, VersionRef]
) -> None:
    rig = await start()
    request = rig.request(max_tokens=LONG, in_flight=InFlight.RECOMPUTE, min_delta_interval_s=0.0)
    items = rig.open(request)
    await first(items)
    before = await anext(items)
    assert isinstance(before, Delta)
    await rig.engine.load(versions[1])
    deltas = [before, *await rest(items)]
    spoken = [d.weights_version for d in deltas for _ in d.token_ids]
    assert len(spoken) == LONG
    assert spoken == sorted(spoken)
    assert set(spoken) == {"tiny@0", "tiny@1"}
    await until(rig, lambda stats: stats.versions == ("tiny@1",))


async def test_a_refused_load_leaves_the_old_version_serving(
    start: StartRig, tmp_path: Path
) -> None:
    rig = await start()
    before = await rig.say()
    absent = VersionRef(weights_version="tiny@9", path=str(tmp_path / "absent"))
    report = await rig.engine.load(absent)
    assert not report.is_accepted
    assert report.reason
    assert report.weights_version == rig.engine.weights_version == "tiny@0"
    assert (await rig.say()).ids() == before.ids()


async def test_a_third_version_waits_until_the_oldest_has_drained(
    start: StartRig, versions: tuple[VersionRef, VersionRef], tmp_path: Path
) -> None:
    rig = await start(max_model_len=2048)
    items = rig.open(rig.request(max_tokens=ENDLESS))
    await first(items)
    await rig.engine.load(versions[1])
    third = VersionRef(weights_version="tiny@2", path=str(tmp_path / "absent"))
    report = await rig.engine.load(third)
    assert (report.is_accepted, report.is_deferred) == (False, True)
    assert report.weights_version == "tiny@1"
    assert "2 versions are held (tiny@0, tiny@1)" in report.reason
    assert "try again" in report.reason
    await items.aclose()
    await until(rig, lambda stats: stats.versions == ("tiny@1",))
    report = await rig.engine.load(third)
    assert (report.is_accepted, report.is_deferred) == (False, False)
    assert (await rig.engine.load(versions[0])).is_accepted


async def test_a_held_version_can_be_pinned_and_no_other(
    start: StartRig, versions: tuple[VersionRef, VersionRef]
) -> None:
    rig = await start(max_model_len=2048)
    items = rig.open(rig.request(max_tokens=ENDLESS))
    await first(items)
    await rig.engine.load(versions[1])
    pinned = await rig.say(weights_pin="tiny@0")
    assert set(pinned.versions()) == {"tiny@0"}
    await items.aclose()
    with pytest.raises(RequestError, match="tiny@7") as caught:
        await rig.say(weights_pin="tiny@7")
    assert caught.value.code == "unknown_weights_version"


async def test_a_full_queue_is_overloaded(start: StartRig) -> None:
    rig = await start(max_model_len=2048, num_slots=1, max_waiting=1)
    running = rig.open(rig.request(max_tokens=ENDLESS))
    await first(running)
    waiting = asyncio.create_task(rest(rig.open(rig.request(max_tokens=2))))
    await until(rig, lambda stats: stats.num_waiting == 1)
    with pytest.raises(OverloadedError) as caught:
        await rig.say()
    assert caught.value.status == 503
    await running.aclose()
    assert (await waiting)[-1].stop is StopCause.LENGTH


async def test_higher_priority_goes_first(start: StartRig) -> None:
    rig = await start(max_model_len=2048, num_slots=1)
    running = rig.open(rig.request(max_tokens=ENDLESS))
    await first(running)
    order: list[str] = []

    async def wait_for(name: str, priority: int) -> None:
        items = rig.open(rig.request(max_tokens=2, priority=priority))
        await first(items)
        order.append(name)
        await rest(items)

    tasks = []
    for waiting, (name, priority) in enumerate((("a", 0), ("b", 0), ("c", 5)), start=1):
        tasks.append(asyncio.create_task(wait_for(name, priority)))
        # one after the other: over a network, what is sent at once may overtake
        await until(rig, lambda stats, waiting=waiting: stats.num_waiting == waiting)
    await running.aclose()
    await asyncio.gather(*tasks)
    assert order == ["c", "a", "b"]


async def test_a_prompt_that_is_too_long_is_refused(start: StartRig) -> None:
    rig = await start()
    prompt = rig.prompt() * 40
    with pytest.raises(RequestError) as caught:
        await rig.say(prompt_ids=prompt)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert caught.value.status == 400
    assert str(len(prompt)) in str(caught.value)
    room = rig.engine.capabilities.max_model_len
    assert str(caught.value).startswith(f"This model's maximum context length is {room} tokens")


@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": Grammar(text="start: (")},
        {"in_flight": InFlight.CARRY},
        {"prompt_ids": ()},
        {"prompt_ids": (1, 1_000_000)},
        {"top_logprobs": 1_000},
        {"n": 0},
    ],
)
async def test_what_an_engine_cannot_do_it_refuses(start: StartRig, fields: dict[str, Any]) -> None:
    rig = await start()
    with pytest.raises(RequestError):
        await rig.say(**fields)


async def test_an_id_cannot_run_twice(start: StartRig) -> None:
    rig = await start(max_model_len=2048)
    request = rig.request(max_tokens=ENDLESS)
    items = rig.open(request)
    await first(items)
    with pytest.raises(RequestError, match="running already"):
        await first(rig.open(request))
    await items.aclose()
    await until(rig, lambda stats: stats.num_running == 0)
    again = rig.open(request)
    await first(again)
    await again.aclose()


async def test_many_requests_share_the_engine(start: StartRig) -> None:
    rig = await start(num_slots=4)
    seeds = [Sampling(seed=i, logit_bias=rig.long_winded.logit_bias) for i in range(12)]
    alone = [await rig.say(max_tokens=8, sampling=seed) for seed in seeds]
    together = await asyncio.gather(
        *(rig.say(max_tokens=8, sampling=seed, n=1 + i % 3) for i, seed in enumerate(seeds))
    )
    assert [said.ids() for said in together] == [said.ids() for said in alone]


async def test_a_reasoning_budget_closes_the_think_block(start: StartRig) -> None:
    rig = await start()
    prompt = (*rig.prompt(), *rig.tok.encode_control("<think>\n"))
    limits = Limits(max_tokens=20, reasoning_budget=4)
    said = await rig.say(prompt_ids=prompt, limits=limits)
    closing = rig.tok.encode_control("</think>\n")
    end = 4 + len(closing)
    assert list(said.ids()[4:end]) == closing
    forced, sampled = TokenFlag.FORCED.value, TokenFlag.SAMPLED.value
    assert said.flags()[:4] == (sampled,) * 4
    assert said.flags()[4:end] == (forced,) * len(closing)
    assert set(said.flags()[end:]) <= {sampled}


async def test_an_answers_limit_starts_behind_the_think_block(start: StartRig) -> None:
    rig = await start()
    prompt = (*rig.prompt(), *rig.tok.encode_control("<think>\n"))
    limits = Limits(max_tokens=60, answer_tokens=3, reasoning_budget=5)
    said = await rig.say(prompt_ids=prompt, limits=limits)
    assert said.stop() is StopCause.LENGTH
    closed = said.ids().index(rig.tok.control_ids["</think>"])
    assert closed <= 5
    assert len(said.ids()) == closed + 1 + 3


async def test_a_scored_prompt_tells_what_was_likelier(start: StartRig) -> None:
    rig = await start()
    said = await rig.say(max_tokens=0, prompt_logprobs=True, top_logprobs=3)
    logprobs, rows = said.started.prompt_logprobs, said.started.prompt_top_logprobs
    prompt = rig.prompt()
    assert len(rows) == len(logprobs) == len(prompt) - 1
    for token_id, logprob, row in zip(prompt[1:], logprobs, rows, strict=True):
        assert len(row) == 3
        values = [top.logprob for top in row]
        assert values == sorted(values, reverse=True)
        assert max(values[0], logprob) == pytest.approx(values[0], abs=1e-5)
        own = [top.logprob for top in row if top.token_id == token_id]
        assert own == [] or own[0] == pytest.approx(logprob, abs=1e-5)
    alone = await rig.say(max_tokens=0, prompt_logprobs=True)
    assert alone.started.prompt_top_logprobs is None
