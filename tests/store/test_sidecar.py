"""The journal reaches the ledger whole, whoever is killed on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from m1serve.config import Settings
from m1serve.errors import StoreError
from m1serve.store import Store
from m1serve.store.journal import JournalWriter
from m1serve.store.segments import segments_of
from m1serve.store.sidecar import Sidecar, run

WRITER = """
import dataclasses, pickle, sys, time, uuid
from pathlib import Path
from m1serve.store.journal import JournalWriter
turn = pickle.loads(Path(sys.argv[2]).read_bytes())
writer = JournalWriter(Path(sys.argv[1]), segment_bytes=20_000)
while True:
    names = [uuid.uuid4().hex for _ in range(5)]
    for name in names:
        writer.append(dataclasses.replace(turn, turn_id=name, request_id=name, session_id=name))
    writer.flush()
    print(" ".join(names), flush=True)
    time.sleep(0.01)
"""
SIDECAR = """
import sys
from pathlib import Path
from m1serve.store import Store
from m1serve.store.sidecar import Sidecar
sidecar = Sidecar(Store.open(sys.argv[1]), Path(sys.argv[2]))
print("ready", flush=True)
while True:
    sidecar.run_once()
"""


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def writer(journal: Path) -> Iterator[JournalWriter]:
    opened = JournalWriter(journal)
    yield opened
    opened.close()


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=os.path.abspath(os.sep),
    )


def kill(process: subprocess.Popen[str]) -> list[str]:
    """kill -9, and what it had said until then."""
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=30)
    return output.splitlines()


def test_a_killed_writer_loses_nothing_it_had_flushed(
    store: Store, journal: Path, tmp_path: Path, recorder: Any
) -> None:
    (tmp_path / "turn").write_bytes(pickle.dumps(recorder.turn(range(300), range(40))))
    sidecar = Sidecar(store, journal)
    promised: set[str] = set()
    for _ in range(2):
        process = start(WRITER, str(journal), str(tmp_path / "turn"))
        assert process.stdout is not None
        first = process.stdout.readline()
        sidecar.run_once()
        time.sleep(0.3)
        promised |= {name for line in [first, *kill(process)] for name in line.split()}
    sidecar.run_once()
    assert len(promised) >= 10
    assert promised <= {
        name for name in promised if store.ledger.turn(name).completion_ids == tuple(range(40))
    }
    assert list(journal.iterdir()) == []


def test_a_sidecar_may_be_killed_at_any_point(
    store: Store, database_url: str, journal: Path, recorder: Any
) -> None:
    num = 0
    with_writer = JournalWriter(journal, segment_bytes=10_000)
    for _ in range(3):
        process = start(SIDECAR, database_url, str(journal))
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(60):
            turn = recorder.turn(range(200), (1, 2), session_id=f"s{num}")
            with_writer.append(turn)
            num += 1
        with_writer.flush()
        kill(process)
    with_writer.close()
    Sidecar(store, journal).run_once()
    assert store.ledger.count_turns() == num
    assert list(journal.iterdir()) == []


def test_ingesting_twice_is_ingesting_once(
    store: Store, journal: Path, writer: JournalWriter, recorder: Any
) -> None:
    writer.append(recorder.turn((1,), (2,)))
    writer.append(recorder.end())
    writer.flush()
    sidecar = Sidecar(store, journal)
    assert [sidecar.run_once(), sidecar.run_once()] == [2, 0]
    assert Sidecar(store, journal).run_once() == 0


def test_two_sidecars_on_one_journal_store_everything_once(
    store: Store, journal: Path, recorder: Any
) -> None:
    sources = [JournalWriter(journal, segment_bytes=20_000) for _ in range(2)]
    for i in range(200):
        sources[i % 2].append(recorder.turn((1,), (2,), session_id=f"s{i % 50}"))
    for source in sources:
        source.close()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            Sidecar(store, journal).run_once()
        except StoreError as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert store.ledger.count_turns() == 200


def test_files_go_only_when_their_rows_are_there(
    store: Store, journal: Path, recorder: Any
) -> None:
    source = JournalWriter(journal, segment_bytes=200)
    for i in range(5):
        source.append(recorder.turn((1,), (2,), session_id=f"s{i}"))
        source.flush()
    directory = journal / source.writer
    sidecar = Sidecar(store, journal)
    num_before = len(segments_of(directory))
    assert num_before > 2
    sidecar.run_once()
    # the newest read one stays: more may come into it
    assert len(segments_of(directory)) == 1
    source.append(recorder.turn((1,), (2,), session_id="last"))
    source.close()
    assert directory.exists()
    assert sidecar.run_once() == 1
    assert not directory.exists()
    assert store.ledger.count_turns() == 6


def test_files_stay_while_a_power_failure_could_take_their_rows(
    tmp_path: Path, journal: Path, recorder: Any
) -> None:
    file = tmp_path / "store.db"
    store = Store.open(f"sqlite:///{file}")
    # a reader that stays in the past keeps SQLite from syncing what was committed after it
    reader = sqlite3.connect(file, isolation_level=None)
    assert store.make_durable()
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM turns").fetchall()
    with contextlib.closing(JournalWriter(journal)) as source:
        source.append(recorder.turn((1,), (2,)))
    sidecar = Sidecar(store, journal)
    assert sidecar.run_once() == 1
    assert not store.make_durable()
    assert (journal / source.writer).exists()
    reader.close()
    assert sidecar.run_once() == 0
    assert not (journal / source.writer).exists()
    store.close()


def test_a_record_no_database_takes_does_not_hold_back_the_others(
    store: Store, journal: Path, writer: JournalWriter, recorder: Any
) -> None:
    bad = recorder.turn((1,), (2,), session_id="bad")
    store.ledger.ingest(recorder.entries(recorder.turn((1,), (2,), session_id="bad")))
    # its number is taken by another turn: the unique index refuses it
    taken = dataclasses.replace(recorder.entry(recorder.turn((1,), (2,))), writer=writer.writer)
    store.ledger.ingest([dataclasses.replace(taken, seq=0)])
    writer.append(bad)
    good = recorder.turn((1,), (2,), session_id="good")
    writer.append(good)
    writer.flush()
    sidecar = Sidecar(store, journal)
    assert sidecar.run_once() >= 1
    assert sidecar.run_once() == 0
    assert store.ledger.turn(good.turn_id) == good
    (entry,) = [e for e in store.audit.list() if e.action == "ingest.refused"]
    assert entry.subject == f"{writer.writer}/0"
    session = store.ledger.session("tenant", "bad")
    assert session is not None
    assert session.is_incomplete


def test_a_session_that_lost_a_turn_is_never_trained(
    workshop: Any, journal: Path, recorder: Any
) -> None:
    store = workshop.store
    source = JournalWriter(journal)
    kept = recorder.turn((1,), (2,))
    source.append(kept)
    source.append(recorder.turn((1, 2, 3), (4, 5), logprobs=(-1.0,)))
    source.append(recorder.turn((1, 2, 3, 4, 5, 6), (7,)))
    source.flush()
    source.append(recorder.end())
    source.close()
    Sidecar(store, journal).run_once()
    (row,) = store.ledger.list_trajectories()
    assert row.num_turns == 2
    assert (row.state, row.state_reason) == (
        "ineligible",
        "capture: a turn of the session was lost",
    )
    workshop.reward(row.trajectory_id)
    assert workshop.state(row.trajectory_id) == "ineligible"


def test_the_process_ingests_until_it_is_told_to_stop(tmp_path: Path, recorder: Any) -> None:
    settings = Settings(home=tmp_path / "home")
    stop = threading.Event()
    thread = threading.Thread(target=run, args=(settings, stop))
    thread.start()
    source = JournalWriter(settings.journal_dir)
    turn = recorder.turn((1,), (2,))
    source.append(turn)
    source.close()
    stop.set()
    thread.join(timeout=30)
    store = Store.open(settings.database)
    assert store.ledger.turn(turn.turn_id) == turn
    store.close()


class Outage:
    """A store whose database does not answer until it does."""

    def __init__(self, store: Store) -> None:
        self.store, self.is_down = store, True
        self.audit = store.audit
        self.ledger = self
        self.num_refused = 0

    def cursors(self, writers: list[str]) -> Any:
        if self.is_down:
            self.num_refused += 1
            raise StoreError("down")
        return self.store.ledger.cursors(writers)

    def ingest(self, *arguments: Any, **options: Any) -> int:
        return self.store.ledger.ingest(*arguments, **options)

    def make_durable(self) -> bool:
        return self.store.make_durable()


def test_a_database_that_is_away_is_waited_for(store: Store, journal: Path, recorder: Any) -> None:
    outage = Outage(store)
    stop = threading.Event()
    sidecar = Sidecar(outage, journal)  # type: ignore[arg-type]
    thread = threading.Thread(
        target=sidecar.run, args=(stop,), kwargs={"poll_s": 0.01, "retry_s": 0.01}
    )
    thread.start()
    source = JournalWriter(journal)
    source.append(recorder.turn((1,), (2,)))
    source.close()
    while outage.num_refused < 3:
        time.sleep(0.01)
    assert store.ledger.count_turns() == 0
    outage.is_down = False
    stop.set()
    thread.join(timeout=30)
    assert store.ledger.count_turns() == 1


def test_a_database_away_for_minutes_costs_no_turn_and_keeps_nobody_waiting(
    store: Store, journal: Path, recorder: Any
) -> None:
    """As many attempts as fail in five minutes, while the journal goes on over many segments."""
    outage = Outage(store)
    stop = threading.Event()
    sidecar = Sidecar(outage, journal)  # type: ignore[arg-type]
    thread = threading.Thread(
        target=sidecar.run, args=(stop,), kwargs={"poll_s": 0.001, "retry_s": 0.001}
    )
    thread.start()
    turns = []
    with contextlib.closing(JournalWriter(journal, segment_bytes=2_000)) as source:
        while outage.num_refused < 150 or len(turns) < 150:
            name = f"s{len(turns)}"
            turns.append(recorder.turn((1, len(turns)), (2,), session_id=name))
            source.append(turns[-1])
            source.append(recorder.end(name))
            source.flush()
        assert source.dropped == 0
        assert store.ledger.count_turns() == 0
        assert len(segments_of(journal / source.writer)) > 5
        outage.is_down = False
        while store.ledger.count_turns() < len(turns):
            assert thread.is_alive()
            time.sleep(0.01)
    stop.set()
    thread.join(timeout=30)
    for turn in turns[:: len(turns) // 10]:
        assert store.ledger.turn(turn.turn_id) == turn
    assert store.ledger.count_trajectories() == {"pending": len(turns)}
    assert store.jobs.counts() == {"queued": len(turns)}
    assert not any(journal.iterdir())
