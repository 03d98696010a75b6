"""The capture journal: an append-only file per serving process, written behind the event loop's
back.

`append` only queues. One thread encodes and writes, after which a killed process has lost nothing;
another syncs, after which a power failure costs nothing either. When the disk refuses, or the
journal holds as much as it may, records are dropped and counted, serving goes on, and the sessions
that lost a turn are marked as soon as the disk takes it. When a thread ends by an error nobody
foresaw, the journal is dead: it takes no record any more and says so.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from struct import error as struct_error

from m1serve.errors import StoreError
from m1serve.store.codec import encode_record
from m1serve.store.journal_reader import Cursor, JournalReader
from m1serve.store.journal_room import JournalRoom
from m1serve.store.lost_sessions import REASON_LOST, LostSessions, Reserve, is_mark
from m1serve.store.records import JournalEntry, JournalRecord
from m1serve.store.segment_file import SegmentFile
from m1serve.store.segments import MAGIC, create_writer_dir, frame, segment_path

__all__ = ["REASON_LOST", "Cursor", "JournalReader", "JournalWriter"]

_BATCH_RECORDS = 64
"""Whoever waits for the first of a batch waits for all of it."""
_MAX_UNSYNCED_BATCHES = 1024
_MARK_AGAIN_S = 1.0
"""How often a disk that refuses is asked for room for the marks of lost turns."""
_log = logging.getLogger(__name__)


class JournalWriter:
    """One a process. Not to be used across a fork."""

    def __init__(
        self,
        directory: Path,
        *,
        writer_id: str | None = None,
        segment_bytes: int = 64 * 2**20,
        max_bytes: int | None = None,
        max_queued: int = 65_536,
        write: Callable[[int, memoryview], int] = os.write,
    ) -> None:
        self.writer = writer_id or uuid.uuid4().hex
        self._directory = directory / self.writer
        self._lock_fd = create_writer_dir(directory, self.writer)
        self._segment_bytes = segment_bytes
        self._max_queued = max_queued
        self._write_bytes = write
        self._queue: queue.SimpleQueue[JournalEntry | Callable[[], None] | None] = (
            queue.SimpleQueue()
        )
        self._later: queue.Queue[Callable[[], None] | None] = queue.Queue(_MAX_UNSYNCED_BATCHES)
        """For the syncing thread, in order; while it is full, writing waits."""
        self._seq_lock = threading.Lock()
        self._next_seq = 0
        self._segment: SegmentFile | None = None
        self._room = JournalRoom(max_bytes)
        self._reserve = Reserve(self._directory)
        self._lost = LostSessions()
        self._drop_lock = threading.Lock()
        self._is_closed = self._has_died = False
        self._num_dropped = 0
        self._threads = [
            threading.Thread(
                target=self._run, args=work, name=f"m1serve-journal-{name}", daemon=True
            )
            for name, work in {
                "write": (self._write_all, partial(self._later.put, None)),
                "sync": (self._sync_all, partial(self._queue.put, None)),
            }.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        """What is appended now will be kept, as far as the disk allows."""
        return not (self._is_closed or self._has_died)

    @property
    def dropped(self) -> int:
        """Records that never reached the disk."""
        return self._num_dropped

    @property
    def num_queued(self) -> int:
        return self._queue.qsize()

    def append(self, record: JournalRecord) -> JournalEntry:
        """Returns at once. Never raises for want of space; StoreError when the journal is dead."""
        if self._is_closed:
            raise StoreError(f"journal {self._directory} is closed; append before close()")
        if self._has_died:
            raise self._death()
        return self._enqueue(record)

    def _enqueue(self, record: JournalRecord) -> JournalEntry:
        with self._seq_lock:
            entry = JournalEntry(writer=self.writer, seq=self._next_seq, record=record)
            self._next_seq += 1
            is_room = self._queue.qsize() < self._max_queued
            if is_room:
                self._queue.put(entry)
        if not is_room:
            self._drop([entry], "the writing thread is too far behind")
        return entry

    def when_written(self, callback: Callable[[], None]) -> None:
        """Calls back, from another thread, once everything appended before is in the file: a killed
        process does not lose it any more. What was dropped counts as written. A journal that dies
        may never call.
        """
        self._queue.put(callback)

    def flush(self, timeout_s: float = 30.0) -> None:
        """Returns when everything appended before is on disk (or counted as dropped)."""
        if self._has_died:
            raise self._death()
        done = threading.Event()
        self._queue.put(partial(self._later.put, done.set))
        if not done.wait(timeout_s):
            raise StoreError(
                f"journal {self._directory} not written within {timeout_s} s; is its disk stuck?"
            )

    def close(self, timeout_s: float = 30.0) -> None:
        """Writes what is queued and gives up the lock, so that readers know the journal is
        complete.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            raise StoreError(
                f"journal {self._directory} not closed within {timeout_s} s; is its disk stuck?"
            )
        os.close(self._lock_fd)

    def _run(self, work: Callable[[], None], end_other: Callable[[], None]) -> None:
        is_done = False
        try:
            work()
            is_done = True
        finally:
            # the error itself goes to threading.excepthook
            if not is_done:
                self._has_died = True
                _log.critical("%s", self._death())
            # which finishes what it has
            end_other()

    def _death(self) -> StoreError:
        return StoreError(
            f"journal {self._directory} is dead: an error that the log has ended a thread of it, "
            "and no record is kept any more; restart the server"
        )

    def _write_all(self) -> None:
        is_open = True
        while is_open:
            batch, callbacks, is_open = self._collect()
            if batch:
                self._write(batch)
            for callback in callbacks:
                try:
                    callback()
                except RuntimeError as error:
                    # its event loop was closed meanwhile; the journal goes on
                    _log.warning("journal %s: nobody waits any more: %s", self.writer, error)
        # nobody appends any more: what is queued from here on are marks
        self._report_lost()
        self._queue.put(None)
        if marks := self._collect()[0]:
            self._write(marks)
        self._leave_segment()

    def _sync_all(self) -> None:
        while (work := self._later.get()) is not None:
            work()

    def _collect(self) -> tuple[list[JournalEntry], list[Callable[[], None]], bool]:
        batch: list[JournalEntry] = []
        callbacks: list[Callable[[], None]] = []
        try:
            item = self._queue.get(timeout=_MARK_AGAIN_S if self._lost else None)
        except queue.Empty:
            self._report_lost()
            return batch, callbacks, True
        while True:
            if item is None:
                return batch, callbacks, False
            if isinstance(item, JournalEntry):
                batch.append(item)
            else:
                callbacks.append(item)
            if len(batch) >= _BATCH_RECORDS:
                return batch, callbacks, True
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch, callbacks, True

    def _write(self, batch: list[JournalEntry]) -> None:
        framed = self._with_room(self._framed(batch))
        kept = [entry for entry, _ in framed]
        if self._segment is not None and self._segment.is_broken:
            self._leave_segment()
        try:
            if self._segment is None:
                self._segment = SegmentFile.create(
                    segment_path(self._directory, batch[0].seq), self._write_bytes
                )
            self._segment.append(b"".join(data for _, data in framed))
        except OSError as error:
            self._drop(kept, f"{self._directory} cannot be written: {error}")
            if self._segment is not None:
                self._segment.cut_back()
                self._leave_segment()
            if self._reserve.release(error):
                self._report_lost()
            return
        self._later.put(partial(self._sync, self._segment, kept))
        if self._segment.num_bytes >= self._segment_bytes:
            self._leave_segment()
        self._reserve.keep()
        self._report_lost()

    def _framed(self, batch: list[JournalEntry]) -> list[tuple[JournalEntry, bytes]]:
        framed = []
        for entry in batch:
            try:
                framed.append((entry, frame(entry.seq, encode_record(entry.record))))
            except (StoreError, ValueError, OverflowError, struct_error) as error:
                self._drop([entry], f"it cannot be encoded: {error}")
        return framed

    def _with_room(
        self, framed: list[tuple[JournalEntry, bytes]]
    ) -> list[tuple[JournalEntry, bytes]]:
        num_open = self._segment.num_bytes if self._segment is not None else 0
        fitting, refused = self._room.split(framed, num_open)
        if refused:
            why = f"{self._directory} holds as much as it may; is the sidecar running?"
            self._drop(refused, why)
            if num_open > len(MAGIC):
                # a reader deletes what has a successor
                self._leave_segment()
        return fitting

    def _leave_segment(self) -> None:
        """The next batch opens another one."""
        segment, self._segment = self._segment, None
        if segment is not None:
            self._room.leave(segment.path, segment.num_bytes)
            self._later.put(segment.close)

    def _sync(self, segment: SegmentFile, batch: list[JournalEntry]) -> None:
        try:
            segment.sync()
        except OSError as error:
            segment.is_broken = True
            self._drop(batch, f"{self._directory} cannot be synced: {error}")

    def _drop(self, entries: list[JournalEntry], why: str) -> None:
        self._lost.note(entries)
        # marks are written later, however often that fails
        num = sum(not is_mark(entry.record) for entry in entries)
        if num == 0:
            return
        with self._drop_lock:
            self._num_dropped += num
        _log.error(
            "journal %s: %d records dropped (%d in all): %s",
            self.writer,
            num,
            self._num_dropped,
            why,
        )

    def _report_lost(self) -> None:
        """Behind what is queued: numbers ascend in a journal."""
        for mark in self._lost.take() if self._lost else ():
            self._enqueue(mark)
