"""The core, stepped by hand: what one step does and in which order."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings
from m1serve.engine import batch as batch_module
from m1serve.engine.core import EngineCore
from m1serve.engine.generation import Generation, Sequence
from m1serve.engine.memory_plan import memory_for
from m1serve.engine.outbox import Item, Outbox, Outlet
from m1serve.engine.sampler import seeded_rng
from m1serve.engine.slots import SlotPool
from m1serve.engine.stopping import StopRules
from m1serve.engine.token_ids import TokenIds
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.weights import load_version
from m1serve.types import (
    Delta,
    GenerateRequest,
    InFlight,
    Limits,
    Sampling,
    Started,
    StopCause,
    VersionRef,
)


class Listener(Outlet):
    """Keeps what is put, at once."""

    def __init__(self) -> None:
        super().__init__(Outbox(), cast(asyncio.AbstractEventLoop, None), cast(Any, None))
        self.items: list[Item] = []

    def put(self, item: Item) -> None:
        self.items.append(item)

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items if isinstance(item, Delta))


class Bench:
    def __init__(self, model: M1ForCausalLM, tok: ChatTokenizer, **changes: Any) -> None:
        self.settings = EngineSettings(**{"num_slots": 4, "max_model_len": 256, **changes})
        self.tok, self.num = tok, 0
        self.core = EngineCore(
            model, weights_version="tiny@0", settings=self.settings, vocab_size=tok.vocab_size
        )

    def submit(self, num_prompt: int, *, n: int = 1, **fields: Any) -> Listener:
        self.num += 1
        request = GenerateRequest(
            id=str(self.num),
            prompt_ids=tuple(10 + i % 300 for i in range(num_prompt)),
            limits=Limits(max_tokens=fields.pop("max_tokens", 100)),
            sampling=Sampling(logit_bias=((self.tok.eos_id, -100.0),)),
            n=n,
            **fields,
        )
        listener = Listener()
        generation = Generation(
            request=request,
            prompt=TokenIds.of(request.prompt_ids),
            outlet=listener,
            order=self.num,
        )
        generation.sequences = [
            Sequence(
                generation=generation,
                choice=i,
                rules=StopRules(
                    request, tokenizer=self.tok, max_model_len=self.settings.max_model_len
                ),
                budget=None,
                rng=seeded_rng(1, i),
                emit_at_s=request.min_delta_interval_s,
                unread=generation.prompt,
            )
            for i in range(n)
        ]
        generation.unplaced.extend(generation.sequences)
        self.core.submit(generation)
        return listener

    @torch.inference_mode()
    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.core.step()


@pytest.fixture
def model(versions: tuple[VersionRef, VersionRef]) -> M1ForCausalLM:
    return load_version(Path(versions[0].path))[0].requires_grad_(False)


def test_a_request_starts_and_says_its_first_token_in_one_step(
    model: M1ForCausalLM, tok: ChatTokenizer
) -> None:
    bench = Bench(model, tok)
    heard = bench.submit(20)
    bench.step()
    assert isinstance(heard.items[0], Started)
    assert heard.num_tokens == 1


def test_a_long_prompt_does_not_starve_what_decodes(
    model: M1ForCausalLM, tok: ChatTokenizer
) -> None:
    bench = Bench(model, tok, prefill_chunk_tokens=16, snapshot_bytes=0)
    talking = bench.submit(8)
    bench.step()
    long = bench.submit(100)
    for num_steps in range(1, 7):
        bench.step()
        assert talking.num_tokens == 1 + num_steps
        assert long.num_tokens == 0
    bench.step()
    assert long.num_tokens == 1


def test_the_budget_is_shared_by_prompts_of_one_step(
    model: M1ForCausalLM, tok: ChatTokenizer
) -> None:
    bench = Bench(model, tok, prefill_chunk_tokens=32)
    first, second, third = (bench.submit(16) for _ in range(3))
    bench.step()
    assert [listener.num_tokens for listener in (first, second, third)] == [1, 1, 0]
    assert third.items == []
    bench.step()
    assert third.num_tokens == 1


def test_choices_fork_in_the_step_that_reads_their_prompt(
    model: M1ForCausalLM, tok: ChatTokenizer
) -> None:
    bench = Bench(model, tok)
    heard = bench.submit(20, n=3)
    bench.step()
    assert [type(item) for item in heard.items] == [Started, Delta, Delta, Delta]
    assert bench.core.stats.prefilled_tokens == 20


def test_forks_join_while_another_prompt_is_half_read(
    model: M1ForCausalLM, tok: ChatTokenizer
) -> None:
    bench = Bench(model, tok, prefill_chunk_tokens=16, num_slots=8)
    alone = Bench(model, tok, prefill_chunk_tokens=16, num_slots=8)
    expected = alone.submit(100, max_tokens=6)
    alone.step(20)
    long = bench.submit(100, max_tokens=6)
    bench.step(2)
    short = bench.submit(8, n=3, priority=1, max_tokens=4)
    bench.step(20)
    assert short.num_tokens == 12
    ids = [d.token_ids for d in long.items if isinstance(d, Delta)]
    assert ids == [d.token_ids for d in expected.items if isinstance(d, Delta)]


def test_an_aborted_leader_takes_its_siblings_along(
    model: M1ForCausalLM, tok: ChatTokenizer
) -> None:
    bench = Bench(model, tok, prefill_chunk_tokens=16)
    heard = bench.submit(100, n=3)
    bench.step()
    bench.core.abort("1")
    assert not bench.core.has_work
    stops = [item.stop for item in heard.items if isinstance(item, Delta)]
    assert len(stops) == 3
    bench.submit(8)
    bench.step(3)
    assert bench.core.stats.num_running == 1


def test_nothing_is_left_behind_when_all_is_said(model: M1ForCausalLM, tok: ChatTokenizer) -> None:
    bench = Bench(model, tok)
    for num_prompt in (5, 9, 30):
        bench.submit(num_prompt, n=2, max_tokens=7)
    bench.step(40)
    assert not bench.core.has_work
    stats = bench.core.stats
    assert (stats.num_running, stats.num_waiting, stats.sampled_tokens) == (0, 0, 6 * 7)


def test_a_request_that_finds_no_memory_ends_and_others_go_on(
    model: M1ForCausalLM, tok: ChatTokenizer
) -> None:
    bench = Bench(model, tok)
    talking = bench.submit(8)
    bench.step()
    rows = bench.core._versions.current.rows
    rows.pool = Full(rows.pool)
    refused = bench.submit(20, n=2)
    bench.step()
    last = [item for item in refused.items if isinstance(item, Delta)]
    assert [item.stop for item in last] == [StopCause.ERROR] * 2
    assert "out of memory" in str(last[0].stop_detail)
    assert talking.num_tokens == 2


def test_who_came_last_gives_way_and_a_higher_priority_after_that(
    model: M1ForCausalLM, tok: ChatTokenizer
) -> None:
    # pages for 8 * 32 tokens, and four rows that want 100 each
    memory_bytes = memory_for(model.config, num_slots=4, num_tokens=8 * 32)
    bench = Bench(model, tok, memory_bytes=memory_bytes, snapshot_bytes=0)
    first, second, third = (bench.submit(20) for _ in range(3))
    preferred = bench.submit(20, priority=1)
    while bench.core.stats.num_preemptions == 0:
        bench.step()
    bench.step(3)
    said = [listener.num_tokens for listener in (preferred, first, second, third)]
    # the two that came last made room for the two that stay
    assert said[0] == said[1] > said[2] == said[3]
    bench.step(400)
    assert not bench.core.has_work
    assert {listener.num_tokens for listener in (preferred, first, second, third)} == {100}


def test_choices_wait_through_a_switch_to_the_weights_they_run_on(
    model: M1ForCausalLM, tok: ChatTokenizer
) -> None:
    """Their leader is reading for them: it must not be forgotten."""
    bench = Bench(model, tok, prefill_chunk_tokens=16)
    heard = bench.submit(40, n=3, max_tokens=2, in_flight=InFlight.RECOMPUTE)
    bench.step()
    assert bench.core.switch_back("tiny@0")
    bench.step(20)
    assert not bench.core.has_work
    assert heard.num_tokens == 6


def test_a_prompt_gives_way_while_it_is_read(model: M1ForCausalLM, tok: ChatTokenizer) -> None:
    """Its first choice was reading for all three, and its scores were noted in part."""
    wide = {"max_model_len": 1600, "prefill_chunk_tokens": 16, "snapshot_bytes": 0}
    # fifty pages of 32 tokens, of which the prompt takes 47
    memory_bytes = memory_for(model.config, num_slots=4, num_tokens=50 * 32)
    asked = {"n": 3, "max_tokens": 5, "prompt_logprobs": True}
    alone = Bench(model, tok, **wide)
    expected = alone.submit(1500, **asked)
    alone.step(200)
    bench = Bench(model, tok, **wide, memory_bytes=memory_bytes)
    said = bench.submit(1500, **asked)
    bench.step(2)
    talk = bench.submit(30, priority=1, max_tokens=100)
    while bench.core.stats.num_preemptions == 0:
        bench.step()
    assert said.items == []
    bench.step(400)
    assert not bench.core.has_work
    assert talk.num_tokens == 100
    starts = [listener.items[0] for listener in (said, expected)]
    assert isinstance(starts[0], Started)
    assert isinstance(starts[1], Started)
    assert starts[0].prompt_logprobs == pytest.approx(starts[1].prompt_logprobs, abs=5e-5)
    ids = [
        [item.token_ids for item in listener.items if isinstance(item, Delta)]
        for listener in (said, expected)
    ]
    assert sorted(ids[0]) == sorted(ids[1])
    assert bench.core.stats.num_free_pages == bench.core.stats.num_pages


@pytest.mark.parametrize("is_aborted", [False, True])
@torch.inference_mode()
def test_a_waiting_choice_keeps_the_version_of_what_it_said(
    model: M1ForCausalLM, tok: ChatTokenizer, is_aborted: bool
) -> None:
    """It gave way, says nothing before its end, and follows the weights."""
    memory_bytes = memory_for(model.config, num_slots=4, num_tokens=8 * 32)
    bench = Bench(model, tok, memory_bytes=memory_bytes, snapshot_bytes=0)
    quiet = {"min_delta_interval_s": math.inf, "in_flight": InFlight.RECOMPUTE}
    heard = [bench.submit(20, **quiet) for _ in range(4)]
    while bench.core.stats.num_preemptions == 0:
        bench.step()
    num_old = [len(s.token_ids) for g in bench.core._open.values() for s in g.sequences]
    bench.core.switch(model, "tiny@1")
    if is_aborted:
        for number in range(1, 5):
            bench.core.abort(str(number))
    bench.step(400)
    for listener, num in zip(heard, num_old, strict=True):
        said = [item for item in listener.items if isinstance(item, Delta)]
        versions = [delta.weights_version for delta in said for _ in delta.token_ids]
        assert versions[:num] == ["tiny@0"] * num
        assert set(versions[num:]) <= {"tiny@1"}
        assert len(versions) == (num if is_aborted else 100)


def test_a_short_prompt_behind_long_ones_is_read_at_once(
    model: M1ForCausalLM, tok: ChatTokenizer
) -> None:
    bench = Bench(model, tok, prefill_chunk_tokens=32, num_slots=8, max_model_len=1024)
    for _ in range(3):
        bench.submit(200)
    bench.step()
    short = bench.submit(8)
    bench.step(2)
    assert short.num_tokens > 0


def test_who_waits_for_a_prefix_keeps_nobody_behind_it(
    model: M1ForCausalLM, tok: ChatTokenizer
) -> None:
    bench = Bench(model, tok, prefill_chunk_tokens=32, num_slots=8)
    bench.submit(200, snapshot_at=(190,))
    bench.step()
    along = bench.submit(201, snapshot_at=(190,))
    other = bench.submit(8, cache_salt="other")
    bench.step(2)
    assert other.num_tokens > 0
    assert along.num_tokens == 0
    bench.step(20)
    started = along.items[0]
    assert isinstance(started, Started)
    assert started.cached_tokens == 190


def test_a_step_reads_a_long_prompt_in_one_piece(
    model: M1ForCausalLM, tok: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of a budget, less than a token costs, is left."""
    bench = Bench(model, tok, prefill_chunk_tokens=64, max_model_len=2048, snapshot_bytes=0)
    bench.submit(2000)
    num_forwards = 0
    read = batch_module.read_together

    def counted(*given: Any, **named: Any) -> None:
        nonlocal num_forwards
        num_forwards += 1
        read(*given, **named)

    monkeypatch.setattr(batch_module, "read_together", counted)
    num_steps = 0
    while bench.core.stats.prefilled_tokens < 2000:
        bench.step()
        num_steps += 1
    assert num_forwards == num_steps > 2000 / 64


class Full(SlotPool):
    """Has no memory for another row."""

    def __init__(self, pool: SlotPool) -> None:
        self.__dict__.update(pool.__dict__)

    def reserve(self, row: int, num_tokens: int) -> bool:
        if row > 0:
            raise torch.OutOfMemoryError("out of memory")
        return super().reserve(row, num_tokens)
