"""The ledger: every sampled token, its sessions and trajectories. Facade over ingest, closing and
views.
"""

from __future__ import annotations

import builtins
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from sqlalchemy import func, select, update

from m1serve.errors import StoreError
from m1serve.store.captured import session_key
from m1serve.store.closing import SessionCloser
from m1serve.store.database import Database, changed, is_conflict
from m1serve.store.erasure import Erasure, erase_session, expired_sessions
from m1serve.store.ingest import ingest
from m1serve.store.journal_reader import Cursor
from m1serve.store.records import JournalEntry, TurnRecord
from m1serve.store.session_report import SessionReport, session_report
from m1serve.store.tables import JournalCursorRow, SessionRow, TrajectoryRow, TurnRow
from m1serve.store.views import (
    TrajectorySummary,
    TrajectoryView,
    load_trajectories,
    load_turns,
    summary,
)

_CLOSE_CHUNK = 50
_SHOWN = 3
_MAX_TRIES = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    session_id: str
    tenant_id: str
    model_id: str
    mode: str
    group_key: str | None
    task_id: str | None
    opened_at: float
    last_seen_at: float
    closed_at: float | None
    close_reason: str | None
    num_turns: int
    is_incomplete: bool


class Ledger:
    def __init__(self, db: Database, *, tenant_key: bytes, job_max_attempts: int) -> None:
        self._db = db
        self._tenant_key = tenant_key
        self._job_max_attempts = job_max_attempts

    def ingest(
        self,
        entries: Sequence[JournalEntry],
        *,
        cursors: Mapping[str, Cursor] | None = None,
    ) -> int:
        """Stores what is new, once however often it is given; returns how many records were new.

        `cursors` move in the same transaction.
        """
        for attempt in range(_MAX_TRIES):
            try:
                return ingest(
                    self._db,
                    entries,
                    cursors=cursors or {},
                    tenant_key=self._tenant_key,
                    job_max_attempts=self._job_max_attempts,
                )
            except StoreError as error:
                if attempt == _MAX_TRIES - 1 or not is_conflict(error):
                    raise
        raise AssertionError("unreachable")

    def cursors(self, writers: Sequence[str]) -> dict[str, Cursor]:
        query = select(JournalCursorRow).where(JournalCursorRow.writer.in_(writers))
        with self._db.read() as session:
            return {
                row.writer: Cursor(segment=row.segment, offset=row.offset, last_seq=row.last_seq)
                for row in session.scalars(query)
            }

    def turn(self, turn_id: str) -> TurnRecord:
        with self._db.read() as session:
            found = load_turns(session, [turn_id])
        if turn_id not in found:
            raise StoreError(
                f"no turn {turn_id!r} in the ledger; was it ingested yet, or was it erased?"
            )
        return found[turn_id]

    def trajectory(self, trajectory_id: str) -> TrajectoryView:
        found = self.trajectories([trajectory_id])
        if not found:
            raise StoreError(
                f"no trajectory {trajectory_id!r}; trajectories exist from the end of a session "
                "until they are erased"
            )
        return found[0]

    def resolve(self, prefix: str) -> str:
        """The one trajectory whose id begins so."""
        is_meant = TrajectoryRow.trajectory_id.startswith(prefix, autoescape=True)
        with self._db.read() as session:
            found = session.scalars(
                select(TrajectoryRow.trajectory_id).where(is_meant).limit(_SHOWN + 1)
            ).all()
        if len(found) == 1:
            return found[0]
        if not found:
            raise StoreError(f"no trajectory {prefix!r}; trajectories exist once a session ended")
        some = ", ".join(sorted(found)[:_SHOWN])
        raise StoreError(f"{prefix!r} begins several trajectories ({some}, ...); give more of it")

    def erase(self, tenant_id: str, session_id: str, *, actor: str) -> Erasure:
        """See m1serve.store.erasure."""
        return erase_session(self._db, tenant_id, session_id, actor=actor)

    def erase_expired(self, retention_s: float | None, now: float | None = None) -> int:
        """Sessions that are kept no longer; returns how many, a part of them at a call."""
        at = time.time() if now is None else now
        with self._db.read() as session:
            expired = expired_sessions(session, retention_s=retention_s, now=at)
        for tenant_id, session_id in expired:
            erase_session(self._db, tenant_id, session_id, actor="retention", now=at)
        return len(expired)

    def tenants_of(self, session_id: str) -> builtins.list[str]:
        """Who has a session of that name."""
        query = select(SessionRow.tenant_id).where(SessionRow.session_id == session_id)
        with self._db.read() as session:
            return sorted(session.scalars(query))

    def trajectories(self, trajectory_ids: Sequence[str]) -> builtins.list[TrajectoryView]:
        """Those that exist, oldest first."""
        with self._db.read() as session:
            return load_trajectories(session, trajectory_ids=trajectory_ids)

    def session(self, tenant_id: str, session_id: str) -> SessionView | None:
        with self._db.read() as session:
            row = session.get(SessionRow, session_key(tenant_id, session_id))
            return _session_view(row) if row is not None else None

    def session_report(self, tenant_id: str, session_id: str) -> SessionReport | None:
        with self._db.read() as session:
            return session_report(session, tenant_id, session_id)

    def list_trajectories(
        self,
        *,
        state: str | None = None,
        model_id: str | None = None,
        session_id: str | None = None,
        tenant_id: str | None = None,
        group_key: str | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> builtins.list[TrajectorySummary]:
        """Newest first."""
        wanted = {
            TrajectoryRow.state: state,
            TrajectoryRow.model_id: model_id,
            TrajectoryRow.session_id: session_id,
            TrajectoryRow.tenant_id: tenant_id,
            TrajectoryRow.group_key: group_key,
        }
        query = select(TrajectoryRow)
        for column, value in wanted.items():
            if value is not None:
                query = query.where(column == value)
        query = query.order_by(TrajectoryRow.created_at.desc(), TrajectoryRow.trajectory_id)
        with self._db.read() as session:
            return [summary(row) for row in session.scalars(query.limit(limit).offset(offset))]

    def close_idle_sessions(self, idle_s: float, now: float | None = None) -> int:
        """Ends sessions without a request for `idle_s`; returns how many."""
        at = time.time() if now is None else now
        is_idle = (SessionRow.closed_at.is_(None)) & (SessionRow.last_seen_at < at - idle_s)
        num_closed = 0
        while True:
            with self._db.write() as session:
                query = select(SessionRow).where(is_idle).order_by(SessionRow.session_key)
                rows = session.scalars(
                    query.limit(_CLOSE_CHUNK).with_for_update(skip_locked=True)
                ).all()
                closer = SessionCloser(
                    self._db, session, now=at, job_max_attempts=self._job_max_attempts
                )
                for row in rows:
                    closer.close(row, "idle")
            num_closed += len(rows)
            if len(rows) < _CLOSE_CHUNK:
                return num_closed

    def give_up_feedback(self, model_id: str, wait_s: float, now: float | None = None) -> int:
        """Trajectories that have waited for feedback longer than `wait_s` hold their group up no
        more; returns how many. Feedback that still comes makes them eligible.
        """
        at = time.time() if now is None else now
        # nothing changes a trajectory that waits, so it has waited since its last change
        stop = (
            update(TrajectoryRow)
            .where(
                TrajectoryRow.model_id == model_id,
                TrajectoryRow.state == "pending",
                TrajectoryRow.task_id.is_(None),
                TrajectoryRow.updated_at < at - wait_s,
            )
            .values(
                state="ineligible",
                state_reason=f"feedback: none within {wait_s:g} s",
                updated_at=at,
            )
        )
        with self._db.write() as session:
            return changed(session, stop)

    def count_turns(self) -> int:
        with self._db.read() as session:
            return session.execute(select(func.count()).select_from(TurnRow)).scalar_one()

    def count_trajectories(self, model_id: str | None = None) -> dict[str, int]:
        """By state."""
        query = select(TrajectoryRow.state, func.count()).group_by(TrajectoryRow.state)
        if model_id is not None:
            query = query.where(TrajectoryRow.model_id == model_id)
        with self._db.read() as session:
            return {row[0]: row[1] for row in session.execute(query)}

    def export(
        self,
        stream: IO[str],
        *,
        state: str | None = None,
        model_id: str | None = None,
    ) -> int:
        """One JSON line a trajectory, oldest first, with its turns' ids, logprobs and versions;
        returns how many.
        """
        num = 0
        for view in self.all_trajectories(state=state, model_id=model_id):
            stream.write(json.dumps(dataclasses.asdict(view)) + "\n")
            num += 1
        return num

    def all_trajectories(
        self, *, state: str | None = None, model_id: str | None = None
    ) -> Iterator[TrajectoryView]:
        """Oldest first, a part at a time; without those that were erased."""
        query = select(TrajectoryRow.trajectory_id)
        if state is not None:
            query = query.where(TrajectoryRow.state == state)
        if model_id is not None:
            query = query.where(TrajectoryRow.model_id == model_id)
        ordered = query.order_by(TrajectoryRow.created_at, TrajectoryRow.trajectory_id)
        with self._db.read() as session:
            ids = session.scalars(ordered).all()
        for start in range(0, len(ids), _CLOSE_CHUNK):
            yield from self.trajectories(ids[start : start + _CLOSE_CHUNK])


def _session_view(row: SessionRow) -> SessionView:
    return SessionView(
        session_id=row.session_id,
        tenant_id=row.tenant_id,
        model_id=row.model_id,
        mode=row.mode,
        group_key=row.group_key,
        task_id=row.task_id,
        opened_at=row.opened_at,
        last_seen_at=row.last_seen_at,
        closed_at=row.closed_at,
        close_reason=row.close_reason,
        num_turns=row.num_turns,
        is_incomplete=row.is_incomplete,
    )
