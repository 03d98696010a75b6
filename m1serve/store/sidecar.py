"""Moves journals into the ledger: a process on the journal's disk. Run with `python -m
m1serve.store.sidecar`.

May be killed at any point: cursors move with the rows, files go only after the rows are safe.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from m1serve.config import Settings, load_settings
from m1serve.errors import StoreError
from m1serve.store.database import is_refusal
from m1serve.store.journal import REASON_LOST
from m1serve.store.journal_reader import Cursor, JournalReader
from m1serve.store.records import JournalEntry, SessionEnded, TurnRecord
from m1serve.store.store import Store, load_tenant_key

_BATCH_RECORDS = 256
_log = logging.getLogger(__name__)


class Sidecar:
    def __init__(self, store: Store, journal_dir: Path) -> None:
        self._store = store
        self._reader = JournalReader(journal_dir)

    def run_once(self) -> int:
        """Ingests whatever the journals hold by now; returns how many records were new."""
        num_new = 0
        while True:
            cursors = self._store.ledger.cursors(self._reader.writers())
            before = dict(cursors)
            entries = list(itertools.islice(self._reader.read_new(cursors), _BATCH_RECORDS))
            if cursors != before:
                num_new += self._ingest(entries, cursors)
            if len(entries) < _BATCH_RECORDS:
                break
        self._clean()
        return num_new

    def run(self, stop: threading.Event, *, poll_s: float = 0.1, retry_s: float = 2.0) -> None:
        """Until `stop`. A database that does not answer is waited for; the journal keeps all."""
        while True:
            is_last = stop.is_set()
            num_new, wait_s = 0, poll_s
            try:
                num_new = self.run_once()
            except StoreError as error:
                wait_s = retry_s
                _log.error("cannot ingest, next try in %.1f s: %s", retry_s, error)
            if is_last:
                return
            if num_new == 0:
                stop.wait(wait_s)

    def _ingest(self, entries: Sequence[JournalEntry], cursors: Mapping[str, Cursor]) -> int:
        try:
            return self._store.ledger.ingest(entries, cursors=cursors)
        except StoreError as error:
            if not is_refusal(error):
                raise
            _log.warning("a batch was refused, its records go in one by one: %s", error)
        num_new = 0
        for entry in entries:
            try:
                num_new += self._store.ledger.ingest([entry])
            except StoreError as error:
                if not is_refusal(error):
                    raise
                self._set_aside(entry, str(error))
        self._store.ledger.ingest([], cursors=cursors)
        return num_new

    def _set_aside(self, entry: JournalEntry, error: str) -> None:
        """One record that no database takes must not hold back all that follow it."""
        _log.error("journal %s, seq %d is refused: %s", entry.writer, entry.seq, error)
        self._store.audit.record(
            actor="sidecar",
            action="ingest.refused",
            subject=f"{entry.writer}/{entry.seq}",
            reason=error[:2000],
        )
        record = entry.record
        if isinstance(record, TurnRecord):
            lost = SessionEnded(
                session_id=record.session_id,
                tenant_id=record.tenant_id,
                at=record.created_at,
                reason=REASON_LOST,
            )
            self._store.ledger.ingest([dataclasses.replace(entry, record=lost)])

    def _clean(self) -> None:
        writers = self._reader.writers()
        cursors = self._store.ledger.cursors(writers)
        spent = [
            path
            for writer in writers
            for path in self._reader.spent(writer, cursors.get(writer, Cursor()))
        ]
        if spent and self._store.make_durable():
            self._reader.delete(spent)


def run(settings: Settings, stop: threading.Event) -> None:
    store = Store.open(
        settings.database,
        tenant_key=load_tenant_key(settings.home),
        job_max_attempts=settings.score.max_attempts,
    )
    try:
        Sidecar(store, settings.journal_dir).run(stop)
    finally:
        store.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="m1serve.store.sidecar", description=__doc__)
    parser.add_argument("--config", type=Path, help="settings file (TOML)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    run(load_settings(arguments.config), stop)


if __name__ == "__main__":
    main()
