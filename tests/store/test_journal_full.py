"""A journal that may hold no more, or whose disk is full: what it drops and what it says of it."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from m1serve.store import Store
from m1serve.store.journal import JournalReader, JournalWriter
from m1serve.store.lost_sessions import LostSessions, is_mark
from m1serve.store.records import JournalEntry, SessionEnded, TurnRecord, TurnsDelivered
from m1serve.store.segments import segments_of
from m1serve.store.sidecar import Sidecar

LIMIT = 2**20


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@contextlib.contextmanager
def writing(journal: Path, **options: Any) -> Iterator[JournalWriter]:
    writer = JournalWriter(journal, **options)
    try:
        yield writer
    finally:
        writer.close()


def records(journal: Path) -> list[Any]:
    return [entry.record for entry in JournalReader(journal).read_new({})]


def size_of(journal: Path) -> int:
    return sum(path.stat().st_size for path in journal.rglob("*.seg"))


def large_turn(recorder: Any, session_id: str) -> TurnRecord:
    """About 100 KB in the journal: ids that hardly compress."""
    noise = struct.unpack("<40000I", os.urandom(160_000))
    ids = tuple(number & 0x1FFFF for number in noise)
    turn: TurnRecord = recorder.turn(ids, (1,), session_id=session_id)
    return turn


def until(condition: Callable[[], object]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came to pass")


def test_beyond_its_limit_a_journal_drops_turns_and_marks_their_sessions(
    journal: Path, recorder: Any
) -> None:
    with writing(journal, max_bytes=LIMIT, segment_bytes=300_000) as writer:
        for number in range(40):
            writer.append(large_turn(recorder, f"s{number}"))
            writer.flush()
        writer.append(TurnsDelivered(session_id="s0", tenant_id="tenant", turn_ids=("t",)))
        writer.flush()
        dropped = writer.dropped
    kept = [r.session_id for r in records(journal) if isinstance(r, TurnRecord)]
    marked = [r.session_id for r in records(journal) if is_mark(r)]
    assert dropped == len(marked) > 20
    assert sorted(kept + marked) == sorted(f"s{n}" for n in range(40))
    assert any(isinstance(r, TurnsDelivered) for r in records(journal))
    assert size_of(journal) <= LIMIT + 2**16


def test_a_reader_makes_room_again(store: Store, journal: Path, recorder: Any) -> None:
    sidecar = Sidecar(store, journal)
    with writing(journal, max_bytes=LIMIT, segment_bytes=300_000) as writer:
        for number in range(20):
            writer.append(large_turn(recorder, f"s{number}"))
        writer.flush()
        num_dropped = writer.dropped
        assert num_dropped > 0
        sidecar.run_once()
        writer.append(large_turn(recorder, "after"))
        writer.flush()
        assert writer.dropped == num_dropped
        sidecar.run_once()
    assert store.ledger.session("tenant", "after").num_turns == 1  # type: ignore[union-attr]


def test_a_segment_larger_than_the_limit_blocks_nothing_for_ever(
    store: Store, journal: Path, recorder: Any
) -> None:
    sidecar = Sidecar(store, journal)
    with writing(journal, max_bytes=LIMIT) as writer:
        for _ in range(3):
            for _ in range(15):
                writer.append(large_turn(recorder, "s"))
            writer.flush()
            sidecar.run_once()
        before = writer.dropped
        writer.append(large_turn(recorder, "s"))
        writer.flush()
        assert writer.dropped == before


def test_a_session_that_lost_a_turn_is_incomplete_and_never_trained(
    store: Store, journal: Path, recorder: Any
) -> None:
    with writing(journal, max_bytes=LIMIT) as writer:
        writer.append(recorder.turn((1,), (2,), session_id="lossy"))
        writer.append(recorder.turn((1,), (2,), session_id="whole"))
        for _ in range(15):
            writer.append(large_turn(recorder, "lossy"))
        for name in ("lossy", "whole"):
            writer.append(recorder.end(name))
    Sidecar(store, journal).run_once()
    sessions = {name: store.ledger.session("tenant", name) for name in ("lossy", "whole")}
    assert {name: s.is_incomplete for name, s in sessions.items()} == {  # type: ignore[union-attr]
        "lossy": True,
        "whole": False,
    }
    states = {(r.session_id, r.state) for r in store.ledger.list_trajectories()}
    assert states == {("lossy", "ineligible"), ("whole", "pending")}


class FullDisk:
    """os.write on a disk with so many bytes left; files that are deleted give theirs back."""

    def __init__(self, journal: Path, num_bytes: int) -> None:
        self.journal, self.num_bytes = journal, num_bytes

    def write(self, descriptor: int, data: Any) -> int:
        used = sum(p.stat().st_size for p in self.journal.rglob("*") if p.is_file())
        if used + len(data) > self.num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data)


def test_a_full_disk_still_takes_the_marks_of_what_it_lost(journal: Path, recorder: Any) -> None:
    disk = FullDisk(journal, 200_000)
    with writing(journal, write=disk.write) as writer:
        writer.append(recorder.turn((1,), (2,), session_id="s0"))
        writer.flush()
        for number in range(1, 4):
            writer.append(large_turn(recorder, f"s{number}"))
            writer.flush()
        until(lambda: sum(map(is_mark, records(journal))) == 2)
        # nothing was closed, nothing has more room: a kill -9 here loses no mark
        assert {r.session_id for r in records(journal) if is_mark(r)} == {"s2", "s3"}
        assert writer.dropped == 2


def test_marks_that_found_no_room_are_written_when_there_is_some(
    journal: Path, recorder: Any
) -> None:
    disk = FullDisk(journal, 10**9)
    with writing(journal, write=disk.write) as writer:
        writer.append(recorder.turn((1,), (2,), session_id="s0"))
        writer.flush()
        disk.num_bytes = 0
        writer.append(recorder.turn((1,), (2,), session_id="s1"))
        writer.flush()
        disk.num_bytes = 10**9
        # no request comes any more that would wake the writer
        until(lambda: [r.session_id for r in records(journal) if is_mark(r)] == ["s1"])
    ascending = [entry.seq for entry in JournalReader(journal).read_new({})]
    assert ascending == sorted(ascending)


def test_marks_are_written_at_the_end_at_the_latest(journal: Path, recorder: Any) -> None:
    disk = FullDisk(journal, 0)
    writer = JournalWriter(journal, write=disk.write)
    writer.append(recorder.turn((1,), (2,), session_id="s1"))
    writer.flush()
    disk.num_bytes = 10**9
    writer.close()
    assert [r.session_id for r in records(journal) if is_mark(r)] == ["s1"]
    assert segments_of(journal / writer.writer)


def test_a_session_is_marked_once_unless_its_mark_was_dropped(recorder: Any) -> None:
    lost = LostSessions()
    turn = JournalEntry(writer="w", seq=0, record=recorder.turn((1,), (2,)))
    lost.note([turn, turn])
    (mark,) = lost.take()
    lost.note([turn])
    assert lost.take() == []
    assert isinstance(mark, SessionEnded)
    lost.note([JournalEntry(writer="w", seq=1, record=mark)])
    assert [m.session_id for m in lost.take()] == [mark.session_id]
