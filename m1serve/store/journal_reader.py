"""Reads journals from where a cursor stands; tolerates torn tails and writers that were killed."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from m1serve.errors import StoreError
from m1serve.store.codec import decode_record
from m1serve.store.records import JournalEntry
from m1serve.store.segments import (
    MAGIC,
    Frame,
    Torn,
    is_writer_alive,
    num_bytes,
    read_frames,
    segments_of,
    writer_dirs,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Everything of a writer before this place has been read."""

    segment: int = 0
    """First seq of the segment file."""
    offset: int = 0
    last_seq: int = -1


class JournalReader:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._refused: set[str] = set()

    def writers(self) -> list[str]:
        return [path.name for path in writer_dirs(self._directory)]

    def read_new(self, cursors: MutableMapping[str, Cursor]) -> Iterator[JournalEntry]:
        """Entries behind the cursors, each writer's in order; moves a cursor when its entry is
        taken.
        """
        for path in writer_dirs(self._directory):
            for entry, cursor in self._scan(path, cursors.get(path.name, Cursor())):
                cursors[path.name] = cursor
                if entry is not None:
                    yield entry

    def spent(self, writer: str, cursor: Cursor) -> list[Path]:
        """Segments wholly before the cursor, or the directory of a dead writer read to its end."""
        path = self._directory / writer
        is_dead = not is_writer_alive(path)
        segments = segments_of(path)
        read = [p for first, p in segments if first < cursor.segment]
        if is_dead and segments and segments[-1][0] == cursor.segment:
            last = segments[-1][1]
            if num_bytes(last) <= cursor.offset:
                read.append(last)
        return [path] if is_dead and len(read) == len(segments) else read

    def delete(self, spent: Sequence[Path]) -> None:
        """The caller made sure that what they held is stored for good."""
        for path in spent:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _scan(self, path: Path, cursor: Cursor) -> Iterator[tuple[JournalEntry | None, Cursor]]:
        # asked before reading: what a writer that is dead by now left behind is final
        is_alive = is_writer_alive(path)
        segments = [(first, p) for first, p in segments_of(path) if first >= cursor.segment]
        for index, (first, segment) in enumerate(segments):
            if first != cursor.segment:
                cursor = Cursor(segment=first, offset=0, last_seq=cursor.last_seq)
            for item in _frames(segment, cursor.offset):
                if isinstance(item, Torn):
                    if is_alive and index == len(segments) - 1:
                        return
                    _warn_of(segment, item)
                    cursor = replace(cursor, offset=item.offset + item.num_bytes)
                    continue
                entry = self._decode(path.name, item)
                if entry is None:
                    return
                cursor = replace(cursor, offset=item.end, last_seq=item.seq)
                yield entry, cursor
            # also behind a segment without a record: nothing in it is unread
            yield None, replace(cursor, offset=max(cursor.offset, len(MAGIC)))

    def _decode(self, writer: str, item: Frame) -> JournalEntry | None:
        """None, said once, for what this code cannot read: it stays for the code that wrote it."""
        try:
            record = decode_record(item.payload)
        except StoreError as error:
            if writer not in self._refused:
                self._refused.add(writer)
                _log.error("journal %s stops at seq %d: %s", writer, item.seq, error)
            return None
        return JournalEntry(writer=writer, seq=item.seq, record=record)


def _frames(segment: Path, offset: int) -> Iterator[Frame | Torn]:
    try:
        yield from read_frames(segment, offset)
    except FileNotFoundError:
        # another reader stored it and deleted it meanwhile
        return


def _warn_of(segment: Path, torn: Torn) -> None:
    if torn.num_bytes:
        _log.warning(
            "journal segment %s: %d bytes at %d are no whole record (its writer died); skipped",
            segment,
            torn.num_bytes,
            torn.offset,
        )
