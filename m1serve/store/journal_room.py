"""How much a journal may hold while nobody reads it."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from m1serve.store.records import JournalEntry, TurnRecord
from m1serve.store.segments import num_bytes

_SMALL_BYTES = 2**20
"""Beyond the limit for what is not a turn: deliveries, ends, feedback, and marks of lost turns."""


class JournalRoom:
    """Counts the segments of one writer until their reader deletes them."""

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._left: deque[tuple[Path, int]] = deque()
        self._left_bytes = 0

    def leave(self, path: Path, size: int) -> None:
        """A segment that nothing more is written to."""
        if self._max_bytes is not None:
            self._left.append((path, size))
            self._left_bytes += size

    def split(
        self, framed: list[tuple[JournalEntry, bytes]], open_bytes: int
    ) -> tuple[list[tuple[JournalEntry, bytes]], list[JournalEntry]]:
        """Those there is room for beside an open segment of `open_bytes`, and those to drop."""
        if self._max_bytes is None:
            return framed, []
        fitting, refused = [], []
        size = open_bytes
        for entry, data in framed:
            is_turn = isinstance(entry.record, TurnRecord)
            limit = self._max_bytes + (0 if is_turn else _SMALL_BYTES)
            if self._used(size + len(data), limit) > limit:
                refused.append(entry)
            else:
                fitting.append((entry, data))
                size += len(data)
        return fitting, refused

    def _used(self, size: int, limit: int) -> int:
        """Looks at the disk only when it matters; readers delete the oldest first."""
        if self._left_bytes + size > limit:
            while self._left and num_bytes(self._left[0][0]) == 0:
                self._left_bytes -= self._left.popleft()[1]
        return self._left_bytes + size
