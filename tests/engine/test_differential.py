"""Whatever happens around a request, it says what it would have said alone on a fresh engine.

Arrivals, chunks, forks, aborts, preemptions, swaps and reuse come in any order, and memory that
belongs to nobody is full of NaN.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings
from m1serve.engine.cache_memory import CPU_PAGE_TOKENS
from m1serve.engine.core import EngineCore
from m1serve.engine.generation import Generation, Sequence
from m1serve.engine.memory_plan import memory_for
from m1serve.engine.outbox import Item, Outbox, Outlet
from m1serve.engine.sampler import seeded_rng
from m1serve.engine.stopping import StopRules
from m1serve.engine.token_ids import TokenIds
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.tiny import tiny_config
from m1serve.model.weights import load_version
from m1serve.types import Delta, GenerateRequest, InFlight, Limits, Sampling, StopCause, VersionRef

NAMES = ("tiny@0", "tiny@1")
MAX_TOKENS = 160


@pytest.fixture(scope="module")
def models(versions: tuple[VersionRef, VersionRef]) -> dict[str, M1ForCausalLM]:
    loaded = (load_version(Path(version.path))[0].requires_grad_(False) for version in versions)
    return dict(zip(NAMES, loaded, strict=True))


@dataclass
class Heard(Outlet):
    """What one request was told."""

    request: GenerateRequest = field(kw_only=True)
    items: list[Item] = field(default_factory=list)

    def put(self, item: Item) -> None:
        self.items.append(item)

    def deltas(self, choice: int) -> list[Delta]:
        return [d for d in self.items if isinstance(d, Delta) and d.choice == choice]

    def ids(self, choice: int) -> list[int]:
        return [i for delta in self.deltas(choice) for i in delta.token_ids]

    def logprobs(self, choice: int) -> list[float]:
        return [p for delta in self.deltas(choice) for p in delta.logprobs]

    def versions(self, choice: int) -> list[str]:
        return [d.weights_version for d in self.deltas(choice) for _ in d.token_ids]

    @property
    def is_whole(self) -> bool:
        causes = [self.deltas(choice)[-1].stop for choice in range(self.request.n)]
        return all(cause in (StopCause.LENGTH, StopCause.EOS) for cause in causes)


class Machine:
    """An engine stepped by hand, with NaN wherever nobody lives."""

    def __init__(
        self, models: dict[str, M1ForCausalLM], tok: ChatTokenizer, *, name: str, **changes: int
    ) -> None:
        self._models, self._tok, self._order = models, tok, 0
        chosen = EngineSettings(**{"num_slots": 4, "max_model_len": MAX_TOKENS, **changes})
        self.core = EngineCore(
            models[name], weights_version=name, settings=chosen, vocab_size=tok.vocab_size
        )

    def submit(self, request: GenerateRequest) -> Heard:
        self._order += 1
        heard = Heard(Outbox(), cast(Any, None), cast(asyncio.Queue[Item], None), request=request)
        generation = Generation(
            request=request,
            prompt=TokenIds.of(request.prompt_ids),
            outlet=heard,
            order=self._order,
        )
        seed = request.sampling.seed
        generation.sequences = [
            Sequence(
                generation=generation,
                choice=i,
                rules=StopRules(request, tokenizer=self._tok, max_model_len=MAX_TOKENS),
                budget=None,
                rng=None if seed is None else seeded_rng(seed, i),
                emit_at_s=math.inf if math.isinf(request.min_delta_interval_s) else 0.0,
                unread=generation.prompt,
            )
            for i in range(request.n)
        ]
        generation.unplaced.extend(generation.sequences)
        self.core.submit(generation)
        return heard

    def step(self) -> None:
        self.poison()
        self.core.step()

    def run_dry(self) -> None:
        for _ in range(3_000):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("requests are stuck")

    def poison(self) -> None:
        memory = self.core._memory
        free = torch.tensor(memory.allocator._free, dtype=torch.int64)
        pages = memory._pages
        for t in (*pages.keys.values(), *pages.values.values()):
            t[free] = torch.nan
        for batch in self.core._versions:
            pool = batch.rows.pool
            taken = {sequence.row for sequence in batch.rows}
            empty = [row for row in range(pool.num_rows) if row not in taken]
            for t in (*pool.state.lightning.values(), pool.last_RE):
                t[empty] = torch.nan
            pool.state.page_BM[empty] = 0

    def swap(self, name: str) -> None:
        if not self.core.switch_back(name):
            self.core.switch(self._models[name], name)


# what prompts have in common is what snapshots and waiting readers share
STEM = tuple(range(40, 100))
prompts = st.builds(
    lambda shared, own, tail: STEM[:shared] + tuple(100 + (own + i) % 50 for i in range(tail)),
    st.integers(0, 60),
    st.integers(0, 3),
    st.integers(1, 40),
)
samplings = st.one_of(
    st.just(Sampling(temperature=0.0)), st.builds(Sampling, seed=st.integers(0, 5))
)


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    prompt_ids = draw(prompts)
    cut = draw(st.integers(1, len(prompt_ids)))
    return GenerateRequest(
        id="",
        prompt_ids=prompt_ids,
        sampling=draw(samplings),
        limits=Limits(max_tokens=draw(st.integers(1, 40))),
        n=draw(st.sampled_from((1, 1, 1, 3))),
        priority=draw(st.sampled_from((0, 0, 1))),
        snapshot_at=(cut,) if draw(st.booleans()) else (),
        cache_salt=draw(st.sampled_from(("", "", "other"))),
        min_delta_interval_s=draw(st.sampled_from((0.0, math.inf))),
        in_flight=draw(st.sampled_from((InFlight.FINISH, InFlight.FINISH, InFlight.RECOMPUTE))),
    )


events = st.one_of(
    requests(),
    requests(),
    st.tuples(st.just("steps"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("swap"), st.sampled_from(NAMES)),
)


@st.composite
def machines(draw: st.DrawFn) -> dict[str, int]:
    """From roomy to so tight that one sequence has it all."""
    num_slots = draw(st.integers(1, 5))
    num_pages = draw(st.sampled_from((5, 6, 8, 12, 40)))
    snapshot_bytes = draw(st.sampled_from((0, 60_000, 2**20)))
    return {
        "prefill_chunk_tokens": draw(st.sampled_from((16, 17, 33, 64, 1024))),
        **memory(num_slots=num_slots, num_pages=num_pages, snapshot_bytes=snapshot_bytes),
    }


def memory(*, num_slots: int, num_pages: int, snapshot_bytes: int) -> dict[str, int]:
    """Settings that leave so many pages."""
    tokens = num_pages * CPU_PAGE_TOKENS
    return {
        "num_slots": num_slots,
        "snapshot_bytes": snapshot_bytes,
        "memory_bytes": memory_for(
            tiny_config(), num_slots=num_slots, num_tokens=tokens, snapshot_bytes=snapshot_bytes
        ),
    }


@torch.inference_mode()
def played(machine: Machine, script: list[Any]) -> list[Heard]:
    """As the step thread does: everything in inference mode."""
    heard: list[Heard] = []
    for number, event in enumerate(script):
        if isinstance(event, GenerateRequest):
            request = GenerateRequest(**{**_fields(event), "id": str(number)})
            heard.append(machine.submit(request))
        elif event[0] == "steps":
            for _ in range(event[1]):
                if machine.core.has_work:
                    machine.step()
        elif event[0] == "abort" and heard:
            machine.core.abort(heard[event[1] % len(heard)].request.id)
        elif event[0] == "swap":
            machine.swap(event[1])
    machine.run_dry()
    return heard


def _fields(request: GenerateRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__dataclass_fields__}


def assert_logprobs_are_the_models(heard: Heard, models: dict[str, M1ForCausalLM]) -> None:
    """Each token's, of the version that its delta names, over a whole forward."""
    for choice in range(heard.request.n):
        ids, said = (*heard.request.prompt_ids, *heard.ids(choice)), heard.ids(choice)
        if not said:
            continue
        for name in set(heard.versions(choice)):
            with torch.no_grad():
                logprob_TV = torch.log_softmax(models[name](torch.tensor([ids]))[0, :-1], -1)
            start = len(heard.request.prompt_ids) - 1
            for place, version in enumerate(heard.versions(choice)):
                if version == name:
                    expected = float(logprob_TV[start + place, said[place]])
                    assert heard.logprobs(choice)[place] == pytest.approx(expected, abs=2e-5)


def assert_alone_it_says_the_same(
    heard: Heard, models: dict[str, M1ForCausalLM], tok: ChatTokenizer
) -> None:
    (name,) = {version for choice in range(heard.request.n) for version in heard.versions(choice)}
    alone = Machine(models, tok, name=name, snapshot_bytes=0, num_slots=heard.request.n)
    (expected,) = played(alone, [heard.request])
    for choice in range(heard.request.n):
        assert heard.ids(choice) == expected.ids(choice)
        assert heard.logprobs(choice) == pytest.approx(expected.logprobs(choice), abs=2e-5)
        assert heard.deltas(choice)[-1].stop is expected.deltas(choice)[-1].stop


def check(
    chosen: dict[str, int],
    script: list[Any],
    models: dict[str, M1ForCausalLM],
    tok: ChatTokenizer,
) -> EngineCore:
    machine = Machine(models, tok, name=NAMES[0], **chosen)
    for heard in played(machine, script):
        assert_logprobs_are_the_models(heard, models)
        names = {v for choice in range(heard.request.n) for v in heard.versions(choice)}
        if heard.is_whole and len(names) == 1:
            assert_alone_it_says_the_same(heard, models, tok)
    stats = machine.core.stats
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    while machine.core._memory.snapshots.evict_oldest():
        pass
    assert machine.core.stats.num_free_pages == stats.num_pages
    return machine.core


relaxed = settings(
    deadline=None, max_examples=12, suppress_health_check=list(HealthCheck), print_blob=True
)


@given(chosen=machines(), script=st.lists(events, min_size=3, max_size=14))
@relaxed
def test_nothing_around_a_request_changes_what_it_says(
    models: dict[str, M1ForCausalLM],
    tok: ChatTokenizer,
    chosen: dict[str, int],
    script: list[Any],
) -> None:
    check(chosen, script, models, tok)


@pytest.mark.slow
@given(chosen=machines(), script=st.lists(events, min_size=6, max_size=30))
@settings(relaxed, max_examples=60)
def test_nothing_around_many_requests_changes_what_they_say(
    models: dict[str, M1ForCausalLM],
    tok: ChatTokenizer,
    chosen: dict[str, int],
    script: list[Any],
) -> None:
    check(chosen, script, models, tok)


def test_the_scripts_can_meet_everything(
    models: dict[str, M1ForCausalLM], tok: ChatTokenizer
) -> None:
    """Preemption, snapshots, forks, an abort and a swap in one fixed script."""
    talk = [
        GenerateRequest(
            id="",
            prompt_ids=(*STEM[:32], 100 + i, 120),
            sampling=Sampling(seed=i, logit_bias=()),
            limits=Limits(max_tokens=60),
            n=2 if i == 1 else 1,
            snapshot_at=(32,),
        )
        for i in range(5)
    ]
    script = [*talk[:3], ("steps", 20), ("swap", "tiny@1"), *talk[3:], ("steps", 5), ("abort", 2)]
    chosen = {
        "prefill_chunk_tokens": 24,
        **memory(num_slots=5, num_pages=9, snapshot_bytes=2**20),
    }
    stats = check(chosen, script, models, tok).stats
    assert stats.num_preemptions > 0
    assert stats.prefix_hits > 0
    assert stats.num_swaps == 1
