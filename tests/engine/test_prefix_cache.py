"""Prefix snapshots: the longest that fits, nobody else's, within a budget."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from m1serve.engine.pages import PageAllocator
from m1serve.engine.prefix_cache import PrefixCache, Space
from m1serve.engine.slots import RowSnapshot
from m1serve.engine.token_ids import TokenIds

SPACE = Space(weights_version="m@0", salt="")
OTHER = Space(weights_version="m@0", salt="other")
NEXT = Space(weights_version="m@1", salt="")


def snapshot(num_tokens: int, num_floats: int = 8, pages: list[int] | None = None) -> RowSnapshot:
    """Holds pages of its own unless it is given some."""
    allocator = PageAllocator(100, page_tokens=4)
    held = allocator.take(allocator.pages_for(num_tokens)) if pages is None else pages
    assert held is not None
    return RowSnapshot(
        lightning={},
        last_E=torch.zeros(num_floats),
        num_tokens=num_tokens,
        pages=tuple(held),
        allocator=allocator,
    )


def store(
    cache: PrefixCache, space: Space, ids: tuple[int, ...], num_floats: int = 8
) -> RowSnapshot:
    """Only the cache holds it."""
    kept = snapshot(len(ids), num_floats)
    cache.put(space, TokenIds.of(ids), kept)
    kept.release()
    return kept


def found(cache: PrefixCache, space: Space, ids: tuple[int, ...]) -> int:
    hit = cache.find(space, TokenIds.of(ids))
    return 0 if hit is None else hit.num_tokens


def a_cache(max_bytes: int) -> PrefixCache:
    return PrefixCache(max_bytes)


def test_the_longest_stored_prefix_is_found() -> None:
    cache = a_cache(10_000)
    store(cache, SPACE, (1, 2))
    long = store(cache, SPACE, (1, 2, 3, 4))
    assert cache.find(SPACE, TokenIds.of((1, 2, 3, 4, 5))) is long
    assert found(cache, SPACE, (1, 2, 3, 9)) == 2
    assert found(cache, SPACE, (2, 1, 3)) == 0


def test_the_whole_prompt_is_never_a_hit() -> None:
    cache = a_cache(10_000)
    store(cache, SPACE, (1, 2, 3))
    assert found(cache, SPACE, (1, 2, 3)) == 0
    assert found(cache, SPACE, (1, 2, 3, 4)) == 3


def test_salts_and_versions_are_spaces_of_their_own() -> None:
    cache = a_cache(10_000)
    store(cache, SPACE, (1, 2))
    assert found(cache, OTHER, (1, 2, 3)) == 0
    assert found(cache, NEXT, (1, 2, 3)) == 0


def test_a_dropped_version_is_gone_and_others_stay() -> None:
    cache = a_cache(10_000)
    for space in (SPACE, OTHER, NEXT):
        store(cache, space, (1, 2))
    cache.drop_version("m@0")
    assert [found(cache, space, (1, 2, 3)) for space in (SPACE, OTHER, NEXT)] == [0, 0, 2]
    assert len(cache) == 1


def test_the_least_recently_used_goes_first() -> None:
    one = snapshot(2, 100)
    cache = a_cache(3 * (one.state_bytes + 2 * 4))
    for start in (1, 2, 3):
        store(cache, SPACE, (start, 0), 100)
    assert found(cache, SPACE, (1, 0, 9)) == 2
    assert not cache.wants(SPACE, TokenIds.of((3, 0)), 2)
    store(cache, SPACE, (4, 0), 100)
    assert [found(cache, SPACE, (start, 0, 9)) for start in (1, 2, 3, 4)] == [2, 0, 2, 2]


def test_bytes_are_counted_and_never_exceed_the_budget() -> None:
    cache = a_cache(1_000)
    for start in range(20):
        store(cache, SPACE, (start,), start * 10)
        assert cache.num_bytes <= 1_000
    cache.drop_version("m@0")
    assert (cache.num_bytes, len(cache)) == (0, 0)


def test_storing_again_replaces() -> None:
    cache = a_cache(10_000)
    store(cache, SPACE, (1, 2))
    once = cache.num_bytes
    store(cache, SPACE, (1, 2))
    assert (cache.num_bytes, len(cache)) == (once, 1)


def test_what_is_larger_than_the_budget_is_not_kept() -> None:
    cache = a_cache(50)
    store(cache, SPACE, (1, 2), 1_000)
    assert len(cache) == 0


def test_without_a_budget_nothing_is_wanted() -> None:
    cache = a_cache(0)
    assert not cache.is_enabled
    assert not cache.wants(SPACE, TokenIds.of((1,)), 1)


class Colliding(TokenIds):
    """All of one length look the same."""

    def fingerprint(self, num_tokens: int) -> int:
        return num_tokens


def test_equal_fingerprints_do_not_make_equal_prompts() -> None:
    cache = a_cache(10_000)
    cache.put(SPACE, Colliding.of((1, 2)), snapshot(2))
    assert cache.find(SPACE, Colliding.of((7, 8, 9))) is None
    assert cache.find(SPACE, Colliding.of((1, 2, 9))) is not None


def test_what_is_put_out_lets_go_of_its_pages() -> None:
    cache = a_cache(10_000)
    kept = store(cache, SPACE, (1, 2, 3, 4, 5))
    assert kept.allocator.num_free == 98
    assert cache.evict_oldest()
    assert kept.allocator.num_free == 100
    assert not cache.evict_oldest()


def test_states_and_ids_are_counted_and_shared_pages_are_not() -> None:
    cache = a_cache(10_000)
    long = store(cache, SPACE, (1, 2, 3, 4, 5))
    alone = cache.num_bytes
    assert alone == long.state_bytes + 5 * 4
    long.allocator.share(long.pages[:1])
    short = snapshot(4, pages=list(long.pages[:1]))
    short.allocator = long.allocator
    cache.put(SPACE, TokenIds.of((1, 2, 3, 4)), short)
    short.release()
    assert cache.num_bytes - alone == short.state_bytes + 4 * 4
    assert cache.num_reclaimable(long.allocator._holders) == 2
    cache.evict_oldest()
    assert long.allocator.num_free == 99


def test_one_that_is_too_large_puts_nobody_out() -> None:
    cache = a_cache(200)
    store(cache, SPACE, (1, 2))
    kept = store(cache, SPACE, (7, 8, 9), 1_000)
    assert kept.allocator.num_free == 100
    assert found(cache, SPACE, (1, 2, 3)) == 2
    assert len(cache) == 1


def test_what_is_in_use_beside_the_cache_is_not_reclaimable() -> None:
    cache = a_cache(10_000)
    kept = store(cache, SPACE, (1, 2, 3, 4, 5))
    kept.hold()
    assert cache.num_reclaimable(kept.allocator._holders) == 0
    kept.release()
    assert cache.num_reclaimable(kept.allocator._holders) == 2


def test_the_beginning_of_a_long_prompt_is_kept_alone() -> None:
    cache = a_cache(10_000)
    kept = snapshot(2)
    cache.put(SPACE, TokenIds.of(range(1_000)), kept)
    (entry,) = cache._entries.values()
    assert entry.ids.base is None
    assert cache.num_bytes == kept.state_bytes + 2 * 4


def test_a_page_that_somebody_runs_on_is_not_reclaimable() -> None:
    cache = a_cache(10_000)
    kept = store(cache, SPACE, (1, 2, 3, 4, 5))
    kept.allocator.share(kept.pages[:1])
    assert cache.num_reclaimable(kept.allocator._holders) == 1


@given(
    stored=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=12),
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=7),
)
def test_it_agrees_with_a_plain_search(stored: list[list[int]], prompt: list[int]) -> None:
    cache = a_cache(1_000_000)
    for ids in stored:
        store(cache, SPACE, tuple(ids), 1)
    fits = [len(ids) for ids in stored if len(ids) < len(prompt) and prompt[: len(ids)] == ids]
    assert found(cache, SPACE, tuple(prompt)) == max(fits, default=0)
