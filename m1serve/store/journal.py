"""The capture journal: an append-only file per serving process, written behind the event loop's
back.

`append` only queues; a thread encodes, writes and fsyncs whole batches. When the disk refuses,
records are dropped and counted, serving goes on, and the sessions that lost a turn are marked as
soon as writing works again.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from struct import error as struct_error

from m1serve.errors import StoreError
from m1serve.store.codec import encode_record
from m1serve.store.journal_reader import Cursor, JournalReader
from m1serve.store.records import JournalEntry, JournalRecord, SessionEnded, TurnRecord
from m1serve.store.segments import MAGIC, frame, lock_writer, segment_path, sync_dir

__all__ = ["REASON_LOST", "Cursor", "JournalReader", "JournalWriter"]

REASON_LOST = "lost"
"""SessionEnded with this reason ends nothing: it says that a turn of the session could not be
written.
"""

_BATCH_RECORDS = 512
_MAX_LOST_SESSIONS = 100_000
_log = logging.getLogger(__name__)


class JournalWriter:
    """One a process. Not to be used across a fork."""

    def __init__(
        self,
        directory: Path,
        *,
        writer_id: str | None = None,
        segment_bytes: int = 64 * 2**20,
        max_queued: int = 65_536,
        write: Callable[[int, memoryview], int] = os.write,
    ) -> None:
        self.writer = writer_id or uuid.uuid4().hex
        self._directory = directory / self.writer
        self._lock_fd = _create_writer_dir(directory, self.writer)
        self._segment_bytes = segment_bytes
        self._max_queued = max_queued
        self._write_bytes = write
        self._queue: queue.SimpleQueue[JournalEntry | threading.Event | None] = queue.SimpleQueue()
        self._seq_lock = threading.Lock()
        self._next_seq = 0
        self._segment: _Segment | None = None
        self._lost: set[tuple[str, str]] = set()
        self._is_closed = False
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="m1serve-journal", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Records that never reached the disk."""
        return self._num_dropped

    @property
    def num_queued(self) -> int:
        return self._queue.qsize()

    def append(self, record: JournalRecord) -> JournalEntry:
        """Returns at once; durable after the next fsync. Never raises for want of space."""
        if self._is_closed:
            raise StoreError(f"journal {self._directory} is closed; append before close()")
        with self._seq_lock:
            entry = JournalEntry(writer=self.writer, seq=self._next_seq, record=record)
            self._next_seq += 1
            is_room = self._queue.qsize() < self._max_queued
            if is_room:
                self._queue.put(entry)
        if not is_room:
            self._drop([entry], "the writing thread is too far behind")
        return entry

    def flush(self, timeout_s: float = 30.0) -> None:
        """Returns when everything appended before is on disk (or counted as dropped)."""
        done = threading.Event()
        self._queue.put(done)
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
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise StoreError(
                f"journal {self._directory} not closed within {timeout_s} s; is its disk stuck?"
            )
        os.close(self._lock_fd)

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch, waiters, is_open = self._collect()
            if batch:
                self._write(batch)
            for waiter in waiters:
                waiter.set()
        if self._segment is not None:
            self._segment.close()

    def _collect(self) -> tuple[list[JournalEntry], list[threading.Event], bool]:
        batch: list[JournalEntry] = []
        waiters: list[threading.Event] = []
        item = self._queue.get()
        while True:
            if item is None:
                return batch, waiters, False
            if isinstance(item, JournalEntry):
                batch.append(item)
            else:
                waiters.append(item)
            if len(batch) >= _BATCH_RECORDS:
                return batch, waiters, True
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch, waiters, True

    def _write(self, batch: list[JournalEntry]) -> None:
        frames = []
        for entry in batch:
            try:
                frames.append(frame(entry.seq, encode_record(entry.record)))
            except (StoreError, ValueError, OverflowError, struct_error) as error:
                self._drop([entry], f"it cannot be encoded: {error}")
        try:
            if self._segment is None:
                self._segment = _Segment.create(
                    segment_path(self._directory, batch[0].seq), self._write_bytes
                )
            self._segment.append(b"".join(frames))
        except OSError as error:
            self._drop(batch, f"{self._directory} cannot be written: {error}")
            self._abandon_segment()
            return
        if self._segment.num_bytes >= self._segment_bytes:
            self._segment.close()
            self._segment = None
        if self._lost and not self._is_closed:
            self._report_lost()

    def _abandon_segment(self) -> None:
        if self._segment is not None:
            self._segment.abandon()
            self._segment = None

    def _drop(self, entries: list[JournalEntry], why: str) -> None:
        self._num_dropped += len(entries)
        for entry in entries:
            record = entry.record
            is_gap = isinstance(record, TurnRecord) or (
                isinstance(record, SessionEnded) and record.reason == REASON_LOST
            )
            if is_gap and len(self._lost) < _MAX_LOST_SESSIONS:
                self._lost.add((record.tenant_id, record.session_id or ""))
        _log.error(
            "journal %s: %d records dropped (%d in all): %s",
            self.writer,
            len(entries),
            self._num_dropped,
            why,
        )

    def _report_lost(self) -> None:
        lost, self._lost = self._lost, set()
        for tenant_id, session_id in sorted(lost):
            self.append(
                SessionEnded(
                    session_id=session_id, tenant_id=tenant_id, at=time.time(), reason=REASON_LOST
                )
            )


class _Segment:
    """An open segment file; `num_bytes` of it are whole frames."""

    def __init__(
        self, path: Path, descriptor: int, write: Callable[[int, memoryview], int]
    ) -> None:
        self._path = path
        self._fd = descriptor
        self._write = write
        self.num_bytes = 0

    @classmethod
    def create(cls, path: Path, write: Callable[[int, memoryview], int]) -> _Segment:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        segment = cls(path, descriptor, write)
        try:
            segment.append(MAGIC)
            sync_dir(path.parent)
        except OSError:
            segment.abandon()
            raise
        return segment

    def append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._write(self._fd, view) :]
        os.fdatasync(self._fd)
        self.num_bytes += len(data)

    def abandon(self) -> None:
        """Cuts back to whole frames after a failed write; the next batch opens another segment."""
        try:
            if self.num_bytes <= len(MAGIC):
                self._path.unlink(missing_ok=True)
            else:
                os.ftruncate(self._fd, self.num_bytes)
        except OSError as error:
            _log.error("journal segment %s keeps a torn tail: %s", self._path, error)
        self.close()

    def close(self) -> None:
        os.close(self._fd)


def _create_writer_dir(directory: Path, writer: str) -> int:
    # locked before it appears under its name: a reader never takes a starting writer for a dead one
    aside = directory / f".{writer}"
    try:
        aside.mkdir(parents=True)
        descriptor = lock_writer(aside)
        aside.rename(directory / writer)
        sync_dir(directory)
    except OSError as error:
        raise StoreError(
            f"cannot start a journal in {directory / writer}: {error}; "
            "the directory must be writable and the writer id unused"
        ) from error
    return descriptor
