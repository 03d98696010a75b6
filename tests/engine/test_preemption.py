"""Pages run out: who came last gives way, reads everything again, and says what it would have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from m1serve.engine.cache_memory import CPU_PAGE_TOKENS
from m1serve.engine.memory_plan import memory_for
from m1serve.errors import ConfigError
from m1serve.model.tiny import tiny_config
from m1serve.types import Limits, Sampling, StopCause

StartRig = Callable[..., Awaitable[Any]]


def tight(num_pages: int, *, num_slots: int = 8, snapshot_bytes: int = 0) -> dict[str, int]:
    """Settings that leave so many pages; six of them hold the longest sequence."""
    tokens = num_pages * CPU_PAGE_TOKENS
    return {
        "num_slots": num_slots,
        "memory_bytes": memory_for(
            tiny_config(), num_slots=num_slots, num_tokens=tokens, snapshot_bytes=snapshot_bytes
        ),
        "snapshot_bytes": snapshot_bytes,
    }


async def until(holds: Callable[[], bool]) -> None:
    """The engine steps on a thread of its own."""
    for _ in range(20_000):
        if holds():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never came to be")


async def say(rig: Any, seed: int, **fields: Any) -> Any:
    return await rig.say(sampling=Sampling(seed=seed), **fields)


async def test_those_that_gave_way_say_what_they_would_have_said(local: StartRig) -> None:
    wide, narrow = await local(), await local(**tight(8), max_model_len=192)
    assert narrow.engine.stats().num_pages < wide.engine.stats().num_pages
    asks = [
        {"seed": i, "max_tokens": 100, "prompt_ids": wide.prompt("x" * (10 + i))} for i in range(6)
    ]
    alone = [await say(wide, **ask) for ask in asks]
    among = await asyncio.gather(*(say(narrow, **ask) for ask in asks))
    stats = narrow.engine.stats()
    assert stats.num_preemptions > 0
    for one, other in zip(alone, among, strict=True):
        assert other.ids() == one.ids()
        assert other.logprobs() == pytest.approx(one.logprobs(), abs=2e-5)
        assert other.stop() is one.stop()
    assert stats.num_free_pages == stats.num_pages


async def test_snapshots_make_room_before_anybody_gives_way(local: StartRig) -> None:
    rig = await local(**tight(8, snapshot_bytes=2**20))
    for number in range(6):
        await say(rig, number, prompt_ids=rig.prompt(f"{number} is the number of it"))
    kept = rig.engine.stats()
    assert kept.num_snapshots > 0
    assert kept.num_free_pages < kept.num_pages
    said = await say(rig, 1, max_tokens=150)
    assert said.stop() is StopCause.LENGTH
    assert rig.engine.stats().num_preemptions == 0
    assert rig.engine.stats().num_snapshots < kept.num_snapshots + 2


async def test_choices_that_wait_for_pages_are_told_all_the_same(local: StartRig) -> None:
    wide, narrow = await local(), await local(**tight(6))
    prompt = wide.prompt("What is the status of order 4217? " * 6)
    fields = {"n": 5, "max_tokens": 40, "prompt_ids": prompt}
    alone, among = await say(wide, 3, **fields), await say(narrow, 3, **fields)
    for choice in range(5):
        assert among.ids(choice) == alone.ids(choice)
        assert among.logprobs(choice) == pytest.approx(alone.logprobs(choice), abs=2e-5)
    stats = narrow.engine.stats()
    assert stats.num_free_pages == stats.num_pages


async def test_an_abort_while_it_waits_to_come_back_frees_everything(local: StartRig) -> None:
    rig = await local(**tight(8))
    requests = [
        rig.request(limits=Limits(max_tokens=150), sampling=Sampling(seed=i)) for i in range(6)
    ]
    streams = [rig.open(request) for request in requests]
    for stream in streams:
        await anext(stream)
    await until(lambda: rig.engine.stats().num_preemptions > 0)
    for stream in streams:
        await stream.aclose()
    await until(lambda: rig.engine.stats().num_running == 0)
    stats = rig.engine.stats()
    assert (stats.num_waiting, stats.num_free_pages) == (0, stats.num_pages)


async def test_too_little_for_one_sequence_is_refused_at_the_start(local: StartRig) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=100000 tokens needs 0\.02 GiB"):
        await local(memory_bytes=2**21, max_model_len=100_000)
