from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m1serve.errors import StoreError
from m1serve.store.codec import decode_record, encode_record
from m1serve.store.journal import Cursor, JournalReader, JournalWriter
from m1serve.store.lost_sessions import REASON_LOST, is_mark
from m1serve.store.records import FeedbackGiven, JournalEntry, TurnsDelivered
from m1serve.store.segment_file import SegmentFile
from m1serve.store.segments import segments_of
from m1serve.types import Sampling, VersionSpan


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


def read_all(journal: Path) -> list[JournalEntry]:
    return list(JournalReader(journal).read_new({}))


def only_segment(journal: Path, writer: JournalWriter) -> Path:
    ((_, path),) = segments_of(journal / writer.writer)
    return path


def a_feedback() -> FeedbackGiven:
    return FeedbackGiven(
        feedback_id="f",
        tenant_id="t",
        key_id="k",
        at=1.5,
        session_id="s",
        turn_id=None,
        metric="thumb",
        value=-1.0,
        comment="schlecht ✗",
    )


def test_every_kind_of_record_comes_back_equal(journal: Path, recorder: Any) -> None:
    turn = recorder.turn(
        (0, 200_063, 5),
        (7, 8, 9),
        sampling=Sampling(temperature=0.5, logit_bias=((3, -1.5),), stop_token_ids=(4,), seed=11),
        sampled_logprobs=(-0.25, -0.5, -math.inf),
        version_spans=(
            VersionSpan(start=0, end=2, weights_version="nano@3"),
            VersionSpan(start=2, end=3, weights_version="nano@4"),
        ),
        stop_detail="###",
        group_key="g",
    )
    delivered = TurnsDelivered(session_id="s", tenant_id="t", turn_ids=("a", "b"))
    records = [turn, delivered, recorder.end(), a_feedback()]
    with writing(journal) as writer:
        appended = [writer.append(record) for record in records]
        writer.flush()
        found = read_all(journal)
    assert [entry.record for entry in found] == records
    assert [(e.writer, e.seq) for e in found] == [(e.writer, e.seq) for e in appended]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 200_063), max_size=200).map(tuple),
    st.lists(
        st.tuples(st.integers(0, 200_063), st.floats(max_value=0, width=32, allow_nan=False)),
        max_size=100,
    ),
)
def test_the_codec_changes_no_token_and_no_logprob(
    recorder: Any, prompt: tuple[int, ...], sampled: list[tuple[int, float]]
) -> None:
    turn = recorder.turn(
        prompt, tuple(t for t, _ in sampled), logprobs=tuple(p for _, p in sampled)
    )
    assert decode_record(encode_record(turn)) == turn


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": (-0.5,)},
        {"token_flags": (1, 1, 1)},
        {"sampled_logprobs": ()},
        {"version_spans": (VersionSpan(start=0, end=1, weights_version="nano@0"),)},
        {"version_spans": (VersionSpan(start=0, end=2, weights_version="nano"),)},
        {"version_spans": ()},
    ],
)
def test_streams_that_do_not_fit_are_refused_not_padded(
    recorder: Any, changes: dict[str, Any]
) -> None:
    turn = recorder.turn((1,), (2, 3))
    with pytest.raises(StoreError):
        encode_record(dataclasses.replace(turn, **changes))


def test_a_record_that_cannot_be_encoded_is_counted_and_the_next_one_written(
    journal: Path, recorder: Any
) -> None:
    good = recorder.turn((1,), (2,))
    with writing(journal) as writer:
        writer.append(recorder.turn((1,), (2, 3), logprobs=(-1.0,)))
        writer.append(good)
        writer.flush()
        writer.flush()
        records = [entry.record for entry in read_all(journal)]
        assert writer.dropped == 1
    assert records[0] == good
    assert records[1].reason == REASON_LOST  # type: ignore[union-attr]


def test_reading_goes_on_where_the_cursor_stands(journal: Path, recorder: Any) -> None:
    turns = [recorder.turn((i,), (i,)) for i in range(6)]
    cursors: dict[str, Cursor] = {}
    reader = JournalReader(journal)
    with writing(journal) as writer:
        for half in (turns[:3], turns[3:]):
            for turn in half:
                writer.append(turn)
            writer.flush()
            assert [entry.record for entry in reader.read_new(cursors)] == half
        assert list(reader.read_new(cursors)) == []


def test_segments_rotate_and_are_read_in_order(journal: Path, recorder: Any) -> None:
    turns = [recorder.turn(range(50), (i,)) for i in range(20)]
    with writing(journal, segment_bytes=500) as writer:
        for turn in turns:
            writer.append(turn)
            writer.flush()
        assert len(segments_of(journal / writer.writer)) > 3
        assert [entry.record for entry in read_all(journal)] == turns


def test_a_torn_tail_of_a_living_writer_is_waited_for(journal: Path, recorder: Any) -> None:
    turn = recorder.turn((1,), (2,))
    with writing(journal) as writer:
        writer.append(turn)
        writer.flush()
        with only_segment(journal, writer).open("ab") as file:
            file.write(b"\x40\x00\x00\x00half")
        cursors: dict[str, Cursor] = {}
        reader = JournalReader(journal)
        assert [e.record for e in reader.read_new(cursors)] == [turn]
        assert list(reader.read_new(cursors)) == []
        assert reader.spent(writer.writer, cursors[writer.writer]) == []


@pytest.mark.parametrize("cut", [1, 5, 17, 30])
def test_a_torn_tail_of_a_dead_writer_is_final(journal: Path, recorder: Any, cut: int) -> None:
    turns = [recorder.turn((i,), (i,)) for i in range(3)]
    with writing(journal) as writer:
        for turn in turns:
            writer.append(turn)
    path = only_segment(journal, writer)
    os.truncate(path, path.stat().st_size - cut)
    cursors: dict[str, Cursor] = {}
    reader = JournalReader(journal)
    assert [e.record for e in reader.read_new(cursors)] == turns[:2]
    assert reader.spent(writer.writer, cursors[writer.writer]) == [journal / writer.writer]


@pytest.mark.parametrize("content", [b"", b"M1J", b"M1JRNL1\n"])
def test_a_segment_without_a_record_keeps_no_dead_writer_around(
    journal: Path, recorder: Any, content: bytes
) -> None:
    turn = recorder.turn((1,), (2,))
    with writing(journal) as writer:
        writer.append(turn)
    (journal / writer.writer / f"{7:016d}.seg").write_bytes(content)
    cursors: dict[str, Cursor] = {}
    reader = JournalReader(journal)
    assert [e.record for e in reader.read_new(cursors)] == [turn]
    assert reader.spent(writer.writer, cursors[writer.writer]) == [journal / writer.writer]


def test_a_segment_that_another_reader_deletes_is_not_missed(journal: Path, recorder: Any) -> None:
    with writing(journal, segment_bytes=1) as writer:
        for number in range(3):
            writer.append(recorder.turn((number,), (1,)))
            writer.flush()
        found = JournalReader(journal).read_new({})
        next(found)
        for _, path in segments_of(journal / writer.writer)[1:]:
            path.unlink()
        assert list(found) == []


def test_a_flipped_bit_is_never_read_as_a_record(journal: Path, recorder: Any) -> None:
    turns = [recorder.turn((i,), (i,)) for i in range(3)]
    with writing(journal) as writer:
        for turn in turns:
            writer.append(turn)
            writer.flush()
    path = only_segment(journal, writer)
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    assert [e.record for e in read_all(journal)] == turns[:2]


def test_a_writer_that_starts_is_never_taken_for_a_dead_one(journal: Path) -> None:
    stop = threading.Event()
    reader = JournalReader(journal)
    wrong: list[Path] = []

    def look() -> None:
        while not stop.is_set():
            for name in reader.writers():
                wrong.extend(reader.spent(name, Cursor()))

    watcher = threading.Thread(target=look)
    watcher.start()
    writers = [JournalWriter(journal) for _ in range(20)]
    stop.set()
    watcher.join()
    assert wrong == []
    for writer in writers:
        writer.close()
    assert len([s for w in writers for s in reader.spent(w.writer, Cursor())]) == 20


def test_appending_never_waits_for_the_disk(journal: Path, recorder: Any) -> None:
    turn = recorder.turn(range(2000), range(200))
    with writing(journal) as writer:
        began = time.perf_counter()
        for _ in range(200):
            writer.append(turn)
        took = time.perf_counter() - began
        writer.flush()
        assert len(read_all(journal)) == 200
    # measured at 2 µs; the bound leaves room for a busy machine and would still show an fsync
    assert took / 200 < 500e-6


def test_what_is_said_to_be_written_can_be_read_by_others(journal: Path, recorder: Any) -> None:
    with writing(journal) as writer:
        found: list[int] = []
        for number in range(20):
            writer.append(recorder.turn((number,), (1,)))
            done = threading.Event()
            writer.when_written(
                lambda done=done: (found.append(len(read_all(journal))), done.set())
            )
            assert done.wait(5)
    assert found == list(range(1, 21))


def test_a_full_queue_drops_and_counts_instead_of_blocking(journal: Path, recorder: Any) -> None:
    with writing(journal, max_queued=0) as writer:
        writer.append(recorder.turn((1,), (2,)))
        assert writer.dropped == 1


class FullDisk:
    """os.write that refuses while it is full."""

    def __init__(self) -> None:
        self.is_full = False

    def write(self, descriptor: int, data: Any) -> int:
        if self.is_full:
            half = bytes(data[: len(data) // 2])
            os.write(descriptor, half)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data)


def test_a_full_disk_costs_records_but_not_the_service_and_heals(
    journal: Path, recorder: Any
) -> None:
    disk = FullDisk()
    before, during, after = (recorder.turn((i,), (i,), session_id=f"s{i}") for i in range(3))
    with writing(journal, write=disk.write) as writer:
        writer.append(before)
        writer.flush()
        disk.is_full = True
        writer.append(during)
        writer.flush()
        assert writer.dropped == 1
        disk.is_full = False
        writer.append(after)
        writer.flush()
        writer.flush()
        records = [entry.record for entry in read_all(journal)]
    assert [r for r in records if not is_mark(r)] == [before, after]
    assert [r.session_id for r in records if is_mark(r)] == ["s1"]


def test_a_closed_journal_refuses_records(journal: Path, recorder: Any) -> None:
    with writing(journal) as writer:
        pass
    with pytest.raises(StoreError, match="closed"):
        writer.append(recorder.turn((1,), (2,)))


def kill_writing(writer: JournalWriter) -> None:
    writer.when_written(lambda: {}[0])


def kill_syncing(writer: JournalWriter) -> None:
    writer._later.put(lambda: {}[0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kill", [kill_writing, kill_syncing])
def test_a_journal_whose_thread_died_takes_nothing_and_keeps_what_it_had(
    journal: Path, recorder: Any, kill: Any, caplog: pytest.LogCaptureFixture
) -> None:
    turn = recorder.turn((1,), (2,))
    with writing(journal) as writer:
        assert writer.is_alive
        writer.append(turn)
        kill(writer)
        for thread in writer._threads:
            thread.join(5)
        assert not writer.is_alive
        for use in (lambda: writer.append(turn), writer.flush):
            with pytest.raises(StoreError, match=r"is dead.*restart the server"):
                use()
    assert [r.levelname for r in caplog.records] == ["CRITICAL"]
    assert [entry.record for entry in read_all(journal)] == [turn]
    reader, cursors = JournalReader(journal), {}
    list(reader.read_new(cursors))
    assert reader.spent(writer.writer, cursors[writer.writer]) == [journal / writer.writer]


def test_a_segment_that_does_not_close_kills_no_journal(journal: Path, recorder: Any) -> None:
    with writing(journal, segment_bytes=1) as writer:
        writer.append(recorder.turn((1,), (2,)))
        writer.flush()
        writer._later.put(SegmentFile(journal, -1, os.write).close)
        writer.append(recorder.turn((1,), (2,)))
        writer.flush()
        assert writer.is_alive
        assert len(read_all(journal)) == 2


def test_a_journal_that_cannot_be_started_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot start a journal in"):
        JournalWriter(tmp_path / "file" / "journal")
