"""What only an engine with a model can promise: numerics, batching, snapshots, failures, swaps."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.engine.local import LocalEngine
from m1serve.engine.staging import Staged
from m1serve.errors import EngineError, RequestError
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.state import SequenceState
from m1serve.model.weights import load_version
from m1serve.types import Limits, Sampling, StopCause, VersionRef

StartRig = Callable[..., Awaitable[Any]]
Versions = tuple[VersionRef, VersionRef]


async def plain(rig: Any, seed: int, **fields: Any) -> Any:
    """Drawn from the model's own distribution."""
    return await rig.say(sampling=Sampling(seed=seed), **fields)


# ---- numerics and batching ---------------------------------------------------------------------


async def test_neighbours_do_not_change_logprobs(local: StartRig) -> None:
    rig = await local()
    alone = await plain(rig, 3, max_tokens=40)
    others = [plain(rig, i, max_tokens=10 + 5 * i, n=2) for i in range(10, 14)]
    among, *_ = await asyncio.gather(plain(rig, 3, max_tokens=40), *others)
    assert among.ids() == alone.ids()
    assert among.logprobs() == pytest.approx(alone.logprobs(), abs=1e-4)


async def test_logprobs_are_those_of_a_whole_forward(local: StartRig, versions: Versions) -> None:
    rig = await local()
    said = await plain(rig, 5, max_tokens=60)
    model, _ = load_version(Path(versions[0].path))
    ids = (*rig.prompt(), *said.ids())
    with torch.no_grad():
        logprob_TV = torch.log_softmax(model(torch.tensor([ids]))[0, :-1], -1)
    expected = logprob_TV.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert said.logprobs() == pytest.approx(expected[len(rig.prompt()) - 1 :], abs=1e-5)


async def test_chunks_of_a_prompt_add_up_to_the_whole(local: StartRig) -> None:
    prompt_of = lambda rig: rig.prompt("What is the status of order 4217? " * 5)  # noqa: E731
    whole = await local(prefill_chunk_tokens=4096)
    chunked = await local(prefill_chunk_tokens=16)
    said = [await plain(rig, 1, prompt_ids=prompt_of(rig)) for rig in (whole, chunked)]
    assert said[0].ids() == said[1].ids()
    assert said[0].logprobs() == pytest.approx(said[1].logprobs(), abs=1e-5)


async def test_plain_sampling_leaves_out_what_it_does_not_need(local: StartRig) -> None:
    rig = await local()
    said = await plain(rig, 1)
    assert said.deltas[0][0].sampled_logprobs is None
    assert said.deltas[0][0].top_logprobs == ()


async def test_the_prompt_of_many_choices_is_read_once(local: StartRig) -> None:
    rig = await local()
    said = await plain(rig, 1, n=6)
    assert rig.engine.stats().prefilled_tokens == len(rig.prompt())
    assert len({said.ids(choice) for choice in range(6)}) == 6
    for choice in range(6):
        scored = await rig.engine.score((*rig.prompt(), *said.ids(choice)))
        num_said = len(said.ids(choice))
        assert scored.logprobs[-num_said:] == pytest.approx(said.logprobs(choice), abs=1e-5)


async def test_more_choices_than_slots_are_told_in_turn(local: StartRig) -> None:
    wide, narrow = await local(num_slots=8), await local(num_slots=3)
    said = [await plain(rig, 1, n=8, max_tokens=6) for rig in (wide, narrow)]
    assert [said[0].ids(i) for i in range(8)] == [said[1].ids(i) for i in range(8)]
    assert narrow.engine.stats().prefilled_tokens == len(narrow.prompt())


async def test_rows_are_clean_when_they_are_used_again(local: StartRig) -> None:
    rig = await local(num_slots=1, snapshot_bytes=0)
    first = await plain(rig, 2)
    await plain(rig, 9, prompt_ids=rig.prompt("Please cancel it."), max_tokens=30)
    again = await plain(rig, 2)
    assert again.ids() == first.ids()
    assert again.logprobs() == pytest.approx(first.logprobs(), abs=1e-6)


# ---- snapshots ---------------------------------------------------------------------------------


async def conversation(rig: Any, **fields: Any) -> list[Any]:
    """Three turns, each extending the one before, then a second conversation on the same system."""
    system = rig.prompt("You are a helpful assistant. ")
    turns, ids = [], system
    for ask in ("Cancel order 4217.", "Is it pending?", "Thanks."):
        ids = (*ids, *rig.prompt(ask))
        turns.append(await plain(rig, 4, prompt_ids=ids, snapshot_at=(len(system),), **fields))
        ids = (*ids, *turns[-1].ids())
    other = (*system, *rig.prompt("What is the total?"))
    turns.append(await plain(rig, 4, prompt_ids=other, snapshot_at=(len(system),), **fields))
    return turns


async def test_snapshots_change_nothing_but_the_work(local: StartRig) -> None:
    with_rig, without_rig = await local(), await local(snapshot_bytes=0)
    with_turns = await conversation(with_rig, max_tokens=8)
    without_turns = await conversation(without_rig, max_tokens=8)
    for one, other in zip(with_turns, without_turns, strict=True):
        assert one.ids() == other.ids()
        assert one.logprobs() == pytest.approx(other.logprobs(), abs=1e-5)
    assert without_rig.engine.stats().cached_tokens == 0
    assert with_rig.engine.stats().cached_tokens > 0


async def test_cached_tokens_are_exact(local: StartRig) -> None:
    rig = await local()
    system = rig.prompt("You are a helpful assistant. ")
    turns = await conversation(rig, max_tokens=8)
    ask = [len(rig.prompt(text)) for text in ("Cancel order 4217.", "Is it pending?")]
    first_end = len(system) + ask[0] + len(turns[0].ids())
    second_end = first_end + ask[1] + len(turns[1].ids())
    cached = [turn.started.cached_tokens for turn in turns]
    assert cached == [0, first_end, second_end, len(system)]
    stats = rig.engine.stats()
    assert stats.cached_tokens == sum(cached)


async def test_a_prompt_end_is_a_snapshot_too(local: StartRig) -> None:
    rig = await local()
    await plain(rig, 1)
    longer = (*rig.prompt(), *rig.prompt("Really?"))
    said = await plain(rig, 1, prompt_ids=longer)
    assert said.started.cached_tokens == len(rig.prompt())


async def test_at_least_one_token_is_read(local: StartRig) -> None:
    rig = await local()
    first, second = await plain(rig, 1), await plain(rig, 1)
    assert second.started.cached_tokens == 0
    assert second.ids() == first.ids()


async def test_salts_and_versions_share_no_snapshots(local: StartRig, versions: Versions) -> None:
    rig = await local()
    longer = (*rig.prompt(), *rig.prompt("Really?"))
    await plain(rig, 1, cache_salt="a")
    assert (await plain(rig, 1, prompt_ids=longer)).started.cached_tokens == 0
    assert (await plain(rig, 1, prompt_ids=longer, cache_salt="a")).started.cached_tokens > 0
    assert (await rig.engine.load(versions[1])).is_accepted
    fresh = await plain(rig, 1, prompt_ids=longer, cache_salt="a")
    assert fresh.started.cached_tokens == 0
    clean = await local()
    await clean.engine.load(versions[1])
    expected = await plain(clean, 1, prompt_ids=longer)
    assert fresh.ids() == expected.ids()
    assert fresh.logprobs() == pytest.approx(expected.logprobs(), abs=1e-5)


async def test_a_shared_system_prefix_is_read_once_by_requests_that_come_together(
    local: StartRig,
) -> None:
    rig = await local(prefill_chunk_tokens=4096)
    system = rig.prompt("You are a helpful assistant. ")
    asks = [rig.prompt(f"Cancel order {number}.") for number in range(4210, 4216)]
    await asyncio.gather(
        *(plain(rig, 1, prompt_ids=(*system, *ask), snapshot_at=(len(system),)) for ask in asks)
    )
    assert rig.engine.stats().prefilled_tokens == len(system) + sum(map(len, asks))


# ---- sampling ----------------------------------------------------------------------------------


async def test_temperature_zero_takes_the_most_likely(local: StartRig) -> None:
    rig = await local()
    greedy = await rig.say(sampling=Sampling(temperature=0.0), top_logprobs=1)
    only_one = await rig.say(sampling=Sampling(top_k=1, seed=1))
    assert greedy.ids() == only_one.ids()
    delta = greedy.deltas[0][0]
    assert [row[0].token_id for row in delta.top_logprobs] == list(greedy.ids())
    assert delta.sampled_logprobs == (0.0,) * len(greedy.ids())
    assert all(logprob < 0 for logprob in greedy.logprobs())


async def test_logprobs_stay_the_models_own_when_sampling_is_bent(local: StartRig) -> None:
    rig = await local()
    bent = Sampling(seed=1, temperature=0.3, top_p=0.8, presence_penalty=0.5)
    said = await rig.say(sampling=bent, max_tokens=20)
    scored = await rig.engine.score((*rig.prompt(), *said.ids()))
    assert said.logprobs() == pytest.approx(scored.logprobs[-20:], abs=1e-5)
    sampled = said.deltas[0][0].sampled_logprobs
    assert sum(sampled) > sum(said.logprobs())


async def test_a_frequency_penalty_forbids_saying_it_again(local: StartRig) -> None:
    rig = await local()
    strict = Sampling(temperature=0.0, frequency_penalty=100.0)
    said = await rig.say(sampling=strict, max_tokens=40)
    assert len(set(said.ids())) == len(said.ids())


async def test_top_logprobs_are_sorted_and_of_the_model(local: StartRig) -> None:
    rig = await local()
    said = await rig.say(top_logprobs=5, max_tokens=4)
    for row in said.deltas[0][0].top_logprobs:
        values = [entry.logprob for entry in row]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)


async def test_padded_ids_are_never_sampled(local: StartRig) -> None:
    rig = await local()
    said = await rig.say(n=8, max_tokens=60, sampling=Sampling(temperature=5.0))
    assert max(max(said.ids(choice)) for choice in range(8)) < rig.tok.vocab_size


async def test_a_budget_of_zero_closes_at_once(local: StartRig) -> None:
    rig = await local()
    think, end = rig.tok.control_ids["<think>"], rig.tok.control_ids["</think>"]
    opens = Sampling(logit_bias=((think, 100.0),), stop_token_ids=(end,))
    said = await rig.say(sampling=opens, limits=Limits(max_tokens=9, reasoning_budget=0))
    assert said.ids() == (think, end)
    assert said.flags() == (1, 2)


# ---- failures ----------------------------------------------------------------------------------


class PoisonedModel(M1ForCausalLM):
    """Raises, or breaks one row, where it reads the poison."""

    poison: int
    breaks: str

    def hidden(
        self, ids_BT: Tensor, state: SequenceState | None = None, count_B: Tensor | None = None
    ) -> tuple[Tensor, SequenceState]:
        hidden_BTE, state = super().hidden(ids_BT, state, count_B)
        is_bad_B = (ids_BT == self.poison).any(1)
        if is_bad_B.any() and self.breaks == "step":
            raise RuntimeError("poisoned")
        if is_bad_B.any() and self.breaks == "thread":
            raise SystemExit("poisoned beyond repair")
        return torch.where(is_bad_B[:, None, None], math.nan, hidden_BTE), state


def poisoned_engine(
    versions: Versions, tok: ChatTokenizer, settings: Any, *, poison: int, breaks: str
) -> LocalEngine:
    model, _ = load_version(Path(versions[0].path))
    model.__class__ = PoisonedModel
    assert isinstance(model, PoisonedModel)
    model.poison, model.breaks = poison, breaks
    staged = Staged(
        model=model.requires_grad_(False),
        weights_version="tiny@0",
        phases_ms={},
        parity_mean=0.0,
        parity_max=0.0,
    )
    return LocalEngine(staged, settings=settings, tokenizer=tok)


async def test_a_prompt_that_breaks_the_step_ends_alone(
    make_rig: Any, versions: Versions, tok: ChatTokenizer
) -> None:
    poison = tok.encode_text("~")[0]
    rig = make_rig(poisoned_engine, poison=poison, breaks="step")
    healthy = asyncio.create_task(plain(rig, 1, max_tokens=60))
    await asyncio.sleep(0.03)
    bad = await plain(rig, 2, prompt_ids=(*rig.prompt(), poison), n=3)
    assert {bad.stop(choice) for choice in range(3)} == {StopCause.ERROR}
    assert "poisoned" in bad.detail()
    assert (await healthy).stop() is StopCause.LENGTH
    assert (await plain(rig, 1, max_tokens=60)).ids() == (await healthy).ids()


async def test_a_broken_decode_step_ends_what_ran_and_nothing_later(
    make_rig: Any, tok: ChatTokenizer
) -> None:
    poison = tok.encode_text("~")[0]
    rig = make_rig(poisoned_engine, poison=poison, breaks="step")
    fatal = Sampling(logit_bias=((poison, 100.0),))
    assert (await rig.say(sampling=fatal)).stop() is StopCause.ERROR
    assert (await plain(rig, 1)).stop() is StopCause.LENGTH
    assert rig.engine.stats().num_running == 0


async def test_a_row_without_numbers_ends_alone(make_rig: Any, tok: ChatTokenizer) -> None:
    poison = tok.encode_text("~")[0]
    rig = make_rig(poisoned_engine, poison=poison, breaks="row")
    bad, good = await asyncio.gather(
        plain(rig, 1, prompt_ids=(*rig.prompt(), poison)), plain(rig, 1, max_tokens=20)
    )
    assert bad.stop() is StopCause.ERROR
    assert bad.ids() == ()
    assert (good.stop(), len(good.ids())) == (StopCause.LENGTH, 20)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_dead_step_thread_leaves_nobody_waiting(make_rig: Any, tok: ChatTokenizer) -> None:
    poison = tok.encode_text("~")[0]
    rig = make_rig(poisoned_engine, poison=poison, breaks="thread")
    with pytest.raises(EngineError, match="step thread died"):
        await plain(rig, 2, prompt_ids=(*rig.prompt(), poison))
    with pytest.raises(EngineError, match="restart the replica"):
        await plain(rig, 1)
    with pytest.raises(EngineError, match="restart the replica"):
        rig.engine.stats()


async def test_closing_ends_streams_and_refuses_more(local: StartRig, versions: Versions) -> None:
    rig = await local(max_model_len=2048)
    running = await rig.begin(max_tokens=2000)
    await rig.engine.close()
    assert (await running).stop() is StopCause.ABORT
    with pytest.raises(EngineError):
        await rig.say()
    with pytest.raises(EngineError):
        await rig.engine.load(versions[1])


async def test_a_score_that_cannot_be_read_is_refused(local: StartRig) -> None:
    rig = await local()
    with pytest.raises(RequestError):
        await rig.engine.score(())
    with pytest.raises(RequestError, match="tiny@3"):
        await rig.engine.score(rig.prompt(), weights_version="tiny@3")
    assert (await rig.engine.score(rig.prompt()[:1])).logprobs == ()
