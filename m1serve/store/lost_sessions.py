"""Sessions of which a record was dropped: kept until the journal could say so."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from m1serve.store.records import JournalEntry, JournalRecord, SessionEnded, TurnRecord

REASON_LOST = "lost"
"""SessionEnded with this reason ends nothing: it says that a turn of the session could not be
written.
"""
_MAX_SESSIONS = 100_000
_RESERVE_BYTES = 64 * 2**10
"""Room for the marks of some hundred sessions."""
_log = logging.getLogger(__name__)


class LostSessions:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lost: set[tuple[str, str]] = set()
        self._marked: set[tuple[str, str]] = set()

    def __bool__(self) -> bool:
        return bool(self._lost)

    def note(self, dropped: Sequence[JournalEntry]) -> None:
        with self._lock:
            for entry in dropped:
                record = entry.record
                if not isinstance(record, TurnRecord) and not is_mark(record):
                    continue
                name = (record.tenant_id, record.session_id or "")
                if is_mark(record):
                    self._marked.discard(name)
                if name in self._marked or name in self._lost:
                    continue
                if len(self._lost) < _MAX_SESSIONS:
                    self._lost.add(name)
                else:
                    _log.critical(
                        "session %s of tenant %s lost a turn and cannot be marked as incomplete: "
                        "%d others wait to be marked; do not train on this ledger",
                        *reversed(name),
                        _MAX_SESSIONS,
                    )

    def take(self) -> list[SessionEnded]:
        """What the journal has to say; noted again when that is dropped too."""
        with self._lock:
            lost, self._lost = self._lost, set()
            if len(self._marked) > _MAX_SESSIONS:
                self._marked.clear()
            self._marked |= lost
        now = time.time()
        return [
            SessionEnded(session_id=session_id, tenant_id=tenant_id, at=now, reason=REASON_LOST)
            for tenant_id, session_id in sorted(lost)
        ]


def is_mark(record: JournalRecord) -> bool:
    return isinstance(record, SessionEnded) and record.reason == REASON_LOST


class Reserve:
    """A little disk kept back, so that a full one still takes the marks of what it lost."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "reserve"
        self._is_kept = False

    def keep(self) -> None:
        """Takes it, when it is not taken and the disk has it."""
        if self._is_kept:
            return
        try:
            with self._path.open("wb") as file:
                # not zeros: some filesystems store none
                file.write(os.urandom(_RESERVE_BYTES))
            self._is_kept = True
        except OSError as error:
            _log.warning("journal keeps no reserve at %s: %s", self._path, error)
            self._path.unlink(missing_ok=True)

    def release(self, error: OSError) -> bool:
        """Whether that made room for something small."""
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not is_full or not self._is_kept:
            return False
        self._is_kept = False
        self._path.unlink(missing_ok=True)
        return True
