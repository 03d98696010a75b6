"""Journal entries into rows: linked to their sessions, once each, in one transaction with the
reader's cursors.

A turn that arrives after its session was closed (another writer's journal was read later) reopens
nothing: it gets a trajectory of its own, with the turns before it as context.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from m1serve.store.blobs import ids_to_bytes
from m1serve.store.captured import CapturedTurn, capture, session_key, turn_values
from m1serve.store.closing import SessionCloser
from m1serve.store.codec import clean_record
from m1serve.store.database import Database, changed, chunks
from m1serve.store.drift import TurnFacts, link_turn
from m1serve.store.facts import load_facts, save_links, with_superseded
from m1serve.store.journal import REASON_LOST, Cursor
from m1serve.store.prompts import BLOCK_TOKENS, join_prompt, load_blocks, tenant_secret
from m1serve.store.records import (
    FeedbackGiven,
    JournalEntry,
    SessionEnded,
    TurnRecord,
    TurnsDelivered,
)
from m1serve.store.session_rows import session_of_end, session_of_turn, update_session
from m1serve.store.tables import (
    FeedbackRow,
    JournalCursorRow,
    PromptBlockRow,
    SessionRow,
    TrajectoryRow,
    TrajectoryTurnRow,
    TurnRow,
)
from m1serve.types import Mode

_NEWEST_TURNS = 512
"""Parents are looked for among this many."""


def ingest(
    db: Database,
    entries: Sequence[JournalEntry],
    *,
    cursors: Mapping[str, Cursor],
    tenant_key: bytes,
    job_max_attempts: int,
) -> int:
    """Returns how many records were new."""
    entries = [dataclasses.replace(e, record=clean_record(e.record)) for e in entries]
    turns = _captured(entries, tenant_key)
    with db.write() as session:
        work = _Ingest(db, session, job_max_attempts=job_max_attempts)
        work.lock_sessions(turns, entries)
        num_new = work.mark_delivered(entries)
        num_new += work.store_turns(turns)
        num_new += work.end_sessions(entries)
        num_new += work.store_feedback(entries)
        work.save_cursors(cursors)
    return num_new


class _Ingest:
    """One transaction. Sessions are locked in order of their keys, so that two ingesters never
    deadlock.
    """

    def __init__(self, db: Database, session: Session, *, job_max_attempts: int) -> None:
        self._db = db
        self._session = session
        self._now = time.time()
        self._closer = SessionCloser(db, session, now=self._now, job_max_attempts=job_max_attempts)
        self._rows: dict[str, SessionRow] = {}
        self._new: dict[str, list[CapturedTurn]] = {}

    def lock_sessions(self, turns: Sequence[CapturedTurn], entries: Sequence[JournalEntry]) -> None:
        wanted: dict[str, dict[str, object]] = {}
        for turn in turns:
            wanted.setdefault(turn.session_key, session_of_turn(turn))
        for end in _ends(entries):
            wanted.setdefault(_key_of(end), session_of_end(end))
        self._db.insert_new(self._session, SessionRow, [wanted[key] for key in sorted(wanted)])
        delivered = {_key_of(record) for record in _deliveries(entries)}
        for part in chunks(sorted(wanted.keys() | delivered)):
            query = select(SessionRow).where(SessionRow.session_key.in_(part))
            locked = query.order_by(SessionRow.session_key).with_for_update()
            for row in self._session.scalars(locked):
                self._rows[row.session_key] = row

    def mark_delivered(self, entries: Sequence[JournalEntry]) -> int:
        """Those whose turn came with an earlier batch; before anything is linked or closed."""
        num_new = 0
        for record in _deliveries(entries):
            mark = update(TurnRow).where(
                TurnRow.turn_id.in_(record.turn_ids), ~TurnRow.was_delivered
            )
            num_marked = changed(self._session, mark.values(was_delivered=True))
            if num_marked and _key_of(record) in self._rows:
                self._closer.recheck_delivery(self._rows[_key_of(record)])
            num_new += num_marked
        return num_new

    def store_turns(self, turns: Sequence[CapturedTurn]) -> int:
        known = _known_turn_ids(self._session, turns)
        for turn in turns:
            if turn.record.turn_id not in known:
                self._new.setdefault(turn.session_key, []).append(turn)
        values = [v for key in sorted(self._new) for v in self._link(key, self._new[key])]
        self._insert_blocks([turn for new in self._new.values() for turn in new])
        if values:
            self._session.execute(insert(TurnRow), values)
        return len(values)

    def end_sessions(self, entries: Sequence[JournalEntry]) -> int:
        """Ends first, then whatever arrived for sessions that are closed by now."""
        num_new = 0
        for entry in entries:
            end = entry.record
            if not isinstance(end, SessionEnded):
                continue
            row = self._rows[_key_of(end)]
            before = (row.closed_at, row.close_reason, row.is_incomplete)
            if end.reason == REASON_LOST:
                self._closer.mark_incomplete(row)
            elif row.num_turns == 0:
                # its turns are in a journal that was not read yet; they will close it
                row.close_reason = end.reason
            else:
                self._closer.close(row, end.reason, without=self._after(entry))
            num_new += before != (row.closed_at, row.close_reason, row.is_incomplete)
        for key in sorted(self._new):
            row = self._rows[key]
            if row.closed_at is not None:
                self._closer.build(row)
            elif row.close_reason is not None:
                self._closer.close(row, row.close_reason)
        return num_new

    def store_feedback(self, entries: Sequence[JournalEntry]) -> int:
        num_new = 0
        for entry in entries:
            given = entry.record
            if not isinstance(given, FeedbackGiven):
                continue
            is_new = self._db.insert_new(self._session, FeedbackRow, [dataclasses.asdict(given)])
            num_new += is_new
            if is_new or self._say_again(given):
                self._closer.apply_feedback(_trajectories_of(self._session, given))
        return num_new

    def _say_again(self, given: FeedbackGiven) -> int:
        """The same words once more count once, and as said at the later time."""
        again = update(FeedbackRow).where(
            FeedbackRow.feedback_id == given.feedback_id, FeedbackRow.at < given.at
        )
        return changed(self._session, again.values(at=given.at))

    def save_cursors(self, cursors: Mapping[str, Cursor]) -> None:
        for writer, cursor in sorted(cursors.items()):
            row = self._session.get(JournalCursorRow, writer)
            if row is None:
                row = JournalCursorRow(writer=writer)
                self._session.add(row)
            row.segment, row.offset, row.last_seq = cursor.segment, cursor.offset, cursor.last_seq
            row.updated_at = self._now

    def _link(self, key: str, new: Sequence[CapturedTurn]) -> list[dict[str, object]]:
        """Links the new turns, and again those that arrived after them but were ingested before."""
        row = self._rows[key]
        stored = load_facts(self._session, key, newest=_NEWEST_TURNS)
        captured = {turn.record.turn_id: turn for turn in new}
        prompts = {turn_id: turn.prompt for turn_id, turn in captured.items()}
        first = min(turn.facts.order for turn in new)
        linked: list[TurnFacts] = []
        for turn in sorted([*stored, *(t.facts for t in new)], key=lambda t: t.order):
            is_settled = turn.order < first or row.closed_at is not None
            if turn.turn_id in captured or not is_settled:
                link = link_turn(
                    turn,
                    self._prompt(turn.turn_id, prompts),
                    linked,
                    secret=new[0].secret,
                    prompt_of=lambda turn_id: self._prompt(turn_id, prompts),
                )
                turn = dataclasses.replace(turn, **dataclasses.asdict(link))
            linked.append(turn)
        linked = with_superseded(linked)
        save_links(self._session, stored, linked)
        update_session(row, new)
        return [
            turn_values(captured[turn.turn_id], turn, self._now)
            for turn in linked
            if turn.turn_id in captured
        ]

    def _prompt(self, turn_id: str, prompts: dict[str, bytes]) -> bytes:
        if turn_id not in prompts:
            query = select(TurnRow.prompt_blocks, TurnRow.prompt_tail)
            row = self._session.execute(query.where(TurnRow.turn_id == turn_id)).one()
            blocks = load_blocks(self._session, [row.prompt_blocks])
            ids = join_prompt(row.prompt_blocks, row.prompt_tail, blocks)
            prompts[turn_id] = ids_to_bytes(ids)
        return prompts[turn_id]

    def _insert_blocks(self, turns: Sequence[CapturedTurn]) -> None:
        blocks: dict[bytes, dict[str, object]] = {}
        for turn in turns:
            for block_id, ids in turn.split.blocks.items():
                blocks[block_id] = {
                    "block_id": block_id,
                    "tenant_id": turn.record.tenant_id,
                    "ids": ids,
                    "num_tokens": BLOCK_TOKENS,
                    "created_at": self._now,
                }
        rows = [blocks[block_id] for block_id in sorted(blocks)]
        self._db.insert_new(self._session, PromptBlockRow, rows)

    def _after(self, end: JournalEntry) -> set[str]:
        """New turns that its writer journalled behind the end: late, however batches fall."""
        return {
            turn.record.turn_id
            for new in self._new.values()
            for turn in new
            if turn.writer == end.writer and turn.seq > end.seq
        }


def _captured(entries: Sequence[JournalEntry], tenant_key: bytes) -> list[CapturedTurn]:
    """Turns of mode off are counted where they were served and kept nowhere."""
    secrets: dict[str, bytes] = {}
    turns: dict[str, CapturedTurn] = {}
    delivered = {turn_id for record in _deliveries(entries) for turn_id in record.turn_ids}
    for entry in entries:
        record = entry.record
        if isinstance(record, TurnRecord) and record.mode is not Mode.OFF:
            if record.tenant_id not in secrets:
                secrets[record.tenant_id] = tenant_secret(tenant_key, record.tenant_id)
            secret = secrets[record.tenant_id]
            if record.turn_id in delivered:
                record = dataclasses.replace(record, was_delivered=True)
            if record.turn_id not in turns:
                turns[record.turn_id] = capture(entry.writer, entry.seq, record, secret)
    return sorted(turns.values(), key=lambda t: t.facts.order)


def _known_turn_ids(session: Session, turns: Sequence[CapturedTurn]) -> set[str]:
    known: set[str] = set()
    for part in chunks([turn.record.turn_id for turn in turns]):
        known.update(session.scalars(select(TurnRow.turn_id).where(TurnRow.turn_id.in_(part))))
    return known


def _trajectories_of(session: Session, given: FeedbackGiven) -> list[str]:
    query = select(TrajectoryRow.trajectory_id).where(TrajectoryRow.tenant_id == given.tenant_id)
    if given.turn_id is not None:
        is_meant = TrajectoryTurnRow.turn_id == given.turn_id
    elif given.request_id is not None:
        of_request = select(TurnRow.turn_id).where(TurnRow.request_id == given.request_id)
        is_meant = TrajectoryTurnRow.turn_id.in_(of_request)
    else:
        return list(session.scalars(query.where(TrajectoryRow.session_id == given.session_id)))
    own = select(TrajectoryTurnRow.trajectory_id).where(is_meant, ~TrajectoryTurnRow.is_context)
    return list(session.scalars(query.where(TrajectoryRow.trajectory_id.in_(own))))


def _deliveries(entries: Sequence[JournalEntry]) -> list[TurnsDelivered]:
    return [entry.record for entry in entries if isinstance(entry.record, TurnsDelivered)]


def _ends(entries: Sequence[JournalEntry]) -> list[SessionEnded]:
    return [entry.record for entry in entries if isinstance(entry.record, SessionEnded)]


def _key_of(record: SessionEnded | TurnsDelivered) -> str:
    return session_key(record.tenant_id, record.session_id)
