"""Prefix snapshots at every border: what is said from one is what is said without any."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from m1serve.engine.cache_memory import CPU_PAGE_TOKENS
from m1serve.types import Sampling, VersionRef

StartRig = Callable[..., Awaitable[Any]]
Versions = tuple[VersionRef, VersionRef]


async def say(rig: Any, ids: tuple[int, ...], **fields: Any) -> Any:
    return await rig.say(prompt_ids=ids, sampling=Sampling(seed=4), max_tokens=6, **fields)


def assert_equal(one: Any, other: Any) -> None:
    assert one.ids() == other.ids()
    assert one.logprobs() == pytest.approx(other.logprobs(), abs=2e-5)


@pytest.mark.parametrize("pages", [1, 2])
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("num_more", [1, 2, CPU_PAGE_TOKENS])
async def test_around_the_borders_of_pages(
    local: StartRig, pages: int, offset: int, num_more: int
) -> None:
    with_rig, without_rig = await local(), await local(snapshot_bytes=0)
    ids = tuple(range(50, 250))
    border = pages * CPU_PAGE_TOKENS + offset
    first, longer = ids[:border], ids[: border + num_more]
    await say(with_rig, first)
    said = await say(with_rig, longer)
    assert said.started.cached_tokens == border
    assert_equal(said, await say(without_rig, longer))


async def test_two_that_go_on_from_one_snapshot_do_not_meet(local: StartRig) -> None:
    with_rig, without_rig = await local(), await local(snapshot_bytes=0)
    stem = tuple(range(50, 50 + CPU_PAGE_TOKENS + 5))
    await say(with_rig, stem)
    forks = [(*stem, 100 + i, 120) for i in range(4)]
    said = await asyncio.gather(*(say(with_rig, ids) for ids in forks))
    for ids, one in zip(forks, said, strict=True):
        assert one.started.cached_tokens == len(stem)
        assert_equal(one, await say(without_rig, ids))
    # and the snapshot is what it was
    again = await say(with_rig, (*stem, 130))
    assert_equal(again, await say(without_rig, (*stem, 130)))


async def test_a_turn_goes_on_from_its_own_answer(local: StartRig) -> None:
    with_rig, without_rig = await local(), await local(snapshot_bytes=0)
    ids = tuple(range(50, 80))
    for turn in range(5):
        said = await say(with_rig, ids)
        assert_equal(said, await say(without_rig, ids))
        assert said.started.cached_tokens == (len(ids) - 2 if turn else 0)
        ids = (*ids, *said.ids(), 60 + turn, 61)


async def test_another_versions_snapshots_are_not_used(local: StartRig, versions: Versions) -> None:
    rig, fresh = await local(), await local()
    ids = tuple(range(50, 100))
    await say(rig, ids)
    for version in (versions[1], versions[0], versions[1]):
        assert (await rig.engine.load(version)).is_accepted
        await fresh.engine.load(version)
        said = await say(rig, (*ids, 7, 8))
        assert_equal(said, await say(fresh, (*ids, 7, 8), cache_salt=version.weights_version))
    # what the drained versions kept is gone
    stats = rig.engine.stats()
    assert stats.versions == ("tiny@1",)
    assert stats.num_snapshots <= 3


async def test_hits_and_bytes_are_counted(local: StartRig) -> None:
    rig = await local()
    ids = tuple(range(50, 90))
    await say(rig, ids)
    before = rig.engine.stats()
    assert (before.prefix_lookups, before.prefix_hits) == (1, 0)
    assert before.num_snapshots == 2
    assert 0 < before.snapshot_bytes <= 256 * 2**20
    await say(rig, (*ids, 5))
    after = rig.engine.stats()
    assert (after.prefix_lookups, after.prefix_hits, after.cached_tokens) == (2, 1, 40)
    assert after.num_free_pages < after.num_pages


async def test_a_small_budget_keeps_what_was_used_last(local: StartRig) -> None:
    rig = await local(snapshot_bytes=100_000)
    prompts = [tuple(range(start, start + 40)) for start in (50, 150, 250)]
    for ids in prompts:
        await say(rig, ids)
        assert rig.engine.stats().snapshot_bytes <= 100_000
    hits = [(await say(rig, (*ids, 5))).started.cached_tokens > 0 for ids in reversed(prompts)]
    assert hits[0]
    assert not all(hits)
