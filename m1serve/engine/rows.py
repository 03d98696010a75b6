"""RowTable: which sequence is in which row of a pool.

Decoding sequences are in rows 0..n-1, so a decode step works on the pool in place; sequences that
read their prompt are in any rows after those.
"""

from __future__ import annotations

from collections.abc import Iterator

from m1serve.engine.generation import Sequence
from m1serve.engine.slots import RowSnapshot, SlotPool


class RowTable:
    """Owned by the step thread."""

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self.decoding: list[Sequence] = []
        """Sequence i is in row i."""
        self.reading: list[Sequence] = []
        """In order of admission."""
        self.epoch = 0
        """Changes whenever `decoding` does."""

    def __len__(self) -> int:
        return len(self.decoding) + len(self.reading)

    def __iter__(self) -> Iterator[Sequence]:
        return iter((*self.decoding, *self.reading))

    def __contains__(self, sequence: Sequence) -> bool:
        row = sequence.row
        is_decoding = 0 <= row < len(self.decoding) and self.decoding[row] is sequence
        return is_decoding or sequence in self.reading

    def open(self, sequence: Sequence, *, snapshot: RowSnapshot | None) -> bool:
        """Gives the sequence a row to read in, from a snapshot if there is one.

        The pages for all it will read come with it; False when there are not enough.
        """
        row = self._free_row()
        has_pages = False
        try:
            if snapshot is None:
                self.pool.clear(row)
            has_start = snapshot is None or self.pool.restore(row, snapshot)
            has_pages = has_start and self.pool.reserve(row, len(sequence.unread))
        finally:
            if not has_pages:
                self.pool.free(row)
        if has_pages:
            sequence.row = row
            sequence.num_read = sequence.num_cached = snapshot.num_tokens if snapshot else 0
            self.reading.append(sequence)
        return has_pages

    def fork(self, sequence: Sequence, snapshot: RowSnapshot) -> bool:
        """Gives the sequence a row that has read its prompt already; False: pages are short."""
        row = len(self.decoding)
        occupant = self._reader_in(row)
        if occupant is not None:
            target = self._free_row()
            self.pool.move(row, target)
            occupant.row = target
        has_pages = False
        try:
            has_pages = self.pool.restore(row, snapshot)
        finally:
            if not has_pages:
                self.pool.free(row)
        if has_pages:
            sequence.num_read = len(sequence.unread)
            self._append(sequence, row)
        return has_pages

    def promote(self, sequence: Sequence) -> None:
        """Moves a sequence that has read everything to the end of the decoding rows."""
        row = len(self.decoding)
        self.reading.remove(sequence)
        occupant = self._reader_in(row)
        if occupant is not None:
            self.pool.swap(row, sequence.row)
            occupant.row = sequence.row
        elif sequence.row != row:
            self.pool.move(sequence.row, row)
        self._append(sequence, row)

    def release(self, sequence: Sequence) -> None:
        """Takes the sequence out; the last decoding row moves into the gap."""
        self.pool.free(sequence.row)
        if sequence in self.reading:
            self.reading.remove(sequence)
            return
        row, last = sequence.row, self.decoding.pop()
        self.epoch += 1
        if last is not sequence:
            self.pool.move(last.row, row)
            self.decoding[row], last.row = last, row

    def _append(self, sequence: Sequence, row: int) -> None:
        self.decoding.append(sequence)
        sequence.row = row
        self.epoch += 1

    def _reader_in(self, row: int) -> Sequence | None:
        return next((reader for reader in self.reading if reader.row == row), None)

    def _free_row(self) -> int:
        taken = {sequence.row for sequence in self.reading}
        row = len(self.decoding)
        while row in taken:
            row += 1
        return row
