"""Prefix snapshots: the longest that fits, nobody else's, within a budget."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from m1serve.engine.prefix_cache import PrefixCache, Space
from m1serve.engine.slots import RowSnapshot
from m1serve.model.state import SequenceState

SPACE = Space(weights_version="m@0", salt="")
OTHER = Space(weights_version="m@0", salt="other")
NEXT = Space(weights_version="m@1", salt="")


def snapshot(num_floats: int = 8) -> RowSnapshot:
    return RowSnapshot(state=SequenceState.empty(1), last_E=torch.zeros(num_floats))


def found(cache: PrefixCache, space: Space, ids: tuple[int, ...]) -> int:
    hit = cache.find(space, ids)
    return 0 if hit is None else hit.num_tokens


def test_the_longest_stored_prefix_is_found() -> None:
    cache = PrefixCache(10_000)
    short, long = snapshot(), snapshot()
    cache.put(SPACE, (1, 2), short)
    cache.put(SPACE, (1, 2, 3, 4), long)
    hit = cache.find(SPACE, (1, 2, 3, 4, 5))
    assert hit is not None
    assert hit.snapshot is long
    assert found(cache, SPACE, (1, 2, 3, 9)) == 2
    assert found(cache, SPACE, (2, 1, 3)) == 0


def test_the_whole_prompt_is_never_a_hit() -> None:
    cache = PrefixCache(10_000)
    cache.put(SPACE, (1, 2, 3), snapshot())
    assert found(cache, SPACE, (1, 2, 3)) == 0
    assert found(cache, SPACE, (1, 2, 3, 4)) == 3


def test_salts_and_versions_are_spaces_of_their_own() -> None:
    cache = PrefixCache(10_000)
    cache.put(SPACE, (1, 2), snapshot())
    assert found(cache, OTHER, (1, 2, 3)) == 0
    assert found(cache, NEXT, (1, 2, 3)) == 0


def test_a_dropped_version_is_gone_and_others_stay() -> None:
    cache = PrefixCache(10_000)
    for space in (SPACE, OTHER, NEXT):
        cache.put(space, (1, 2), snapshot())
    cache.drop_version("m@0")
    assert [found(cache, space, (1, 2, 3)) for space in (SPACE, OTHER, NEXT)] == [0, 0, 2]
    assert len(cache) == 1


def test_the_least_recently_used_goes_first() -> None:
    one = snapshot(100)
    cache = PrefixCache(3 * (one.num_bytes + 16))
    for start in (1, 2, 3):
        cache.put(SPACE, (start, 0), snapshot(100))
    assert found(cache, SPACE, (1, 0, 9)) == 2
    assert not cache.wants(SPACE, (3, 0))
    cache.put(SPACE, (4, 0), snapshot(100))
    assert [found(cache, SPACE, (start, 0, 9)) for start in (1, 2, 3, 4)] == [2, 0, 2, 2]


def test_bytes_are_counted_and_never_exceed_the_budget() -> None:
    cache = PrefixCache(1_000)
    for start in range(20):
        cache.put(SPACE, (start,), snapshot(start * 10))
        assert cache.num_bytes <= 1_000
    cache.drop_version("m@0")
    assert (cache.num_bytes, len(cache)) == (0, 0)


def test_storing_again_replaces() -> None:
    cache = PrefixCache(10_000)
    cache.put(SPACE, (1, 2), snapshot())
    once = cache.num_bytes
    cache.put(SPACE, (1, 2), snapshot())
    assert (cache.num_bytes, len(cache)) == (once, 1)


def test_what_is_larger_than_the_budget_is_not_kept() -> None:
    cache = PrefixCache(50)
    cache.put(SPACE, (1, 2), snapshot(1_000))
    assert len(cache) == 0


def test_without_a_budget_nothing_is_wanted() -> None:
    cache = PrefixCache(0)
    assert not cache.is_enabled
    assert not cache.wants(SPACE, (1,))


def test_equal_fingerprints_do_not_make_equal_prompts() -> None:
    class Colliding(PrefixCache):
        def _fingerprints(self, ids: tuple[int, ...]):  # noqa: ANN202
            return super()._fingerprints((0,) * len(ids))

    cache = Colliding(10_000)
    cache.put(SPACE, (1, 2), snapshot())
    assert found(cache, SPACE, (7, 8, 9)) == 0
    assert found(cache, SPACE, (1, 2, 9)) == 2


@given(
    stored=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=12),
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=7),
)
def test_it_agrees_with_a_plain_search(stored: list[list[int]], prompt: list[int]) -> None:
    cache = PrefixCache(1_000_000)
    for ids in stored:
        cache.put(SPACE, tuple(ids), snapshot(1))
    fits = [len(ids) for ids in stored if len(ids) < len(prompt) and prompt[: len(ids)] == ids]
    assert found(cache, SPACE, tuple(prompt)) == max(fits, default=0)
