"""PageAllocator: who holds which page of keys and values. Pure counting, no tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Spare(Protocol):
    """Pages that are only kept for later use."""

    def num_reclaimable(self, holders: list[int]) -> int:
        """How many would be free if it let go of everything; `holders` of each page."""
        ...

    def evict_oldest(self) -> bool:
        """Lets go of the least useful; False: there is nothing."""
        ...


class PageAllocator:
    """A page is held by any number of owners and is free again when the last lets go."""

    def __init__(self, num_pages: int, *, page_tokens: int, spare: Spare | None = None) -> None:
        """`spare` makes room when pages run out."""
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self.spare = spare
        self._holders = [0] * num_pages
        # the lowest first: memory that was never touched stays untouched
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def make_room(self, count: int) -> bool:
        """Until so many are free; False, and nothing given up, when that cannot be reached."""
        if self.num_free >= count:
            return True
        spare = self.spare
        if spare is None or self.num_free + spare.num_reclaimable(self._holders) < count:
            return False
        while self.num_free < count:
            if not spare.evict_oldest():
                return False
        return True

    def take(self, count: int) -> list[int] | None:
        """So many pages with one holder each; None, and nothing taken, when there are too few."""
        if not self.make_room(count):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One holder more for each."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free, nobody may share it"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} was released already"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)
