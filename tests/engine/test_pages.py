"""Pages are counted: held as long as somebody holds them, and never by two who write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m1serve.engine.pages import PageAllocator


class Kept:
    """Single pages that may be given back, the oldest first."""

    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator, self.pages = allocator, list[int]()
        allocator.spare = self

    def keep(self, page: int) -> None:
        self.allocator.share([page])
        self.pages.append(page)

    def num_reclaimable(self, holders: list[int]) -> int:
        return sum(holders[page] == self.pages.count(page) for page in set(self.pages))

    def evict_oldest(self) -> bool:
        if not self.pages:
            return False
        self.allocator.release([self.pages.pop(0)])
        return True


def taken(allocator: PageAllocator, count: int) -> list[int]:
    pages = allocator.take(count)
    assert pages is not None
    return pages


def test_the_lowest_pages_are_taken_first() -> None:
    assert taken(PageAllocator(4, page_tokens=8), 2) == [0, 1]


def test_tokens_are_rounded_up_to_pages() -> None:
    allocator = PageAllocator(4, page_tokens=8)
    assert [allocator.pages_for(n) for n in (0, 1, 8, 9)] == [0, 1, 1, 2]


def test_too_many_are_refused_and_none_is_lost() -> None:
    allocator = PageAllocator(4, page_tokens=8)
    taken(allocator, 3)
    assert allocator.take(2) is None
    assert allocator.num_free == 1


def test_a_shared_page_is_free_when_the_last_lets_go() -> None:
    allocator = PageAllocator(2, page_tokens=8)
    pages = taken(allocator, 1)
    allocator.share(pages)
    allocator.release(pages)
    assert allocator.num_free == 1
    allocator.release(pages)
    assert allocator.num_free == 2


def test_what_is_free_is_neither_shared_nor_released() -> None:
    allocator = PageAllocator(2, page_tokens=8)
    with pytest.raises(AssertionError, match="free"):
        allocator.share([0])
    with pytest.raises(AssertionError, match="released already"):
        allocator.release([0])


def test_what_is_only_kept_makes_room_the_oldest_first() -> None:
    allocator = PageAllocator(3, page_tokens=8)
    kept = Kept(allocator)
    pages = taken(allocator, 3)
    for page in pages:
        kept.keep(page)
    allocator.release(pages)
    assert taken(allocator, 1) == [pages[0]]
    assert kept.pages == pages[1:]


def test_nothing_is_given_up_when_it_would_not_be_enough() -> None:
    allocator = PageAllocator(3, page_tokens=8)
    kept = Kept(allocator)
    in_use, spare, _ = taken(allocator, 3)
    kept.keep(in_use)
    kept.keep(spare)
    allocator.release([spare])
    assert allocator.take(2) is None
    assert kept.pages == [in_use, spare]


@given(st.lists(st.tuples(st.sampled_from("tsr"), st.integers(0, 5)), max_size=60))
def test_holders_and_free_pages_add_up(steps: list[tuple[str, int]]) -> None:
    allocator, held = PageAllocator(6, page_tokens=1), list[int]()
    for what, number in steps:
        if what == "t":
            held += allocator.take(number) or []
        elif held and what == "s":
            allocator.share([held[number % len(held)]])
            held.append(held[number % len(held)])
        elif held:
            allocator.release([held.pop(number % len(held))])
        assert allocator.num_free == 6 - len(set(held))
