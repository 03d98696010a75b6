"""Job rows: the truth about background work. Brokers only carry job ids, and may lose or repeat
them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, func, or_, select, update
from sqlalchemy.orm import Session

from m1serve.store.database import Database, changed, clean_text
from m1serve.store.tables import TrajectoryRow
from m1serve.store.work_tables import JobRow

SCORE = "score"
"""The jobs that the ledger enqueues: payload {"trajectory_id"}, key "score:<trajectory_id>"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DueJob:
    job_id: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedJob:
    job_id: str
    kind: str
    payload: Mapping[str, object]
    token: str
    """Whoever completes or fails the job must show it."""
    attempt: int
    """1 the first time."""
    max_attempts: int


def job_row(
    kind: str, key: str, payload: Mapping[str, object], *, now: float, max_attempts: int
) -> dict[str, object]:
    return {
        "job_id": uuid.uuid4().hex,
        "kind": kind,
        "key": key,
        "payload": dict(payload),
        "state": "queued",
        "run_after": now,
        "attempts": 0,
        "max_attempts": max_attempts,
        "created_at": now,
    }


def complete_job(session: Session, job_id: str, token: str, now: float) -> bool:
    """Inside the transaction that stores the job's result; False means that the result is not ours
    to store.
    """
    done = (
        update(JobRow)
        .where(JobRow.job_id == job_id, JobRow.token == token, JobRow.state == "running")
        .values(state="done", finished_at=now, token=None, lease_until=None, error=None)
    )
    return changed(session, done) == 1


class Jobs:
    def __init__(self, db: Database, *, max_attempts: int = 3) -> None:
        self._db = db
        self.max_attempts = max_attempts

    def enqueue(
        self,
        kind: str,
        key: str,
        payload: Mapping[str, object],
        *,
        max_attempts: int | None = None,
        now: float | None = None,
    ) -> str:
        """Returns the job's id; a key that exists already is left as it is."""
        attempts = self.max_attempts if max_attempts is None else max_attempts
        row = job_row(kind, key, payload, now=_clock(now), max_attempts=attempts)
        with self._db.write() as session:
            self._db.insert_new(session, JobRow, [row])
            return session.execute(select(JobRow.job_id).where(JobRow.key == key)).scalar_one()

    def due(
        self, now: float | None = None, limit: int = 100, *, resend_s: float = 30.0
    ) -> list[DueJob]:
        """What must be sent (again): queued and not sent lately, or its worker's lease ran out.

        A job whose last permitted attempt ran out of lease is buried on the way.
        """
        at = _clock(now)
        queued = and_(
            JobRow.state == "queued",
            JobRow.run_after <= at,
            or_(JobRow.sent_at.is_(None), JobRow.sent_at < at - resend_s),
        )
        abandoned = and_(
            _is_abandoned(at),
            or_(JobRow.sent_at < JobRow.lease_until, JobRow.sent_at < at - resend_s),
        )
        query = (
            select(JobRow.job_id, JobRow.kind)
            .where(or_(queued, abandoned))
            .order_by(JobRow.run_after, JobRow.created_at, JobRow.job_id)
            .limit(limit)
        )
        spent = select(JobRow.job_id).where(_is_abandoned(at), _is_spent())
        with self._db.read() as session:
            spent_ids = list(session.scalars(spent))
        for job_id in spent_ids:
            self._bury_spent(job_id, at)
        with self._db.read() as session:
            return [DueJob(job_id=job_id, kind=kind) for job_id, kind in session.execute(query)]

    def mark_sent(self, job_ids: Sequence[str], now: float | None = None) -> None:
        with self._db.write() as session:
            statement = update(JobRow).where(JobRow.job_id.in_(job_ids))
            changed(session, statement.values(sent_at=_clock(now)))

    def claim(self, job_id: str, lease_s: float, now: float | None = None) -> ClaimedJob | None:
        """None when it is done, dead, not due yet, or somebody else holds it."""
        at = _clock(now)
        token = uuid.uuid4().hex
        take = (
            update(JobRow)
            .where(
                JobRow.job_id == job_id,
                JobRow.attempts < JobRow.max_attempts,
                or_(and_(JobRow.state == "queued", JobRow.run_after <= at), _is_abandoned(at)),
            )
            .values(
                state="running",
                token=token,
                lease_until=at + lease_s,
                attempts=JobRow.attempts + 1,
                sent_at=func.coalesce(JobRow.sent_at, at),
            )
        )
        with self._db.write() as session:
            if changed(session, take) == 0:
                return None
            row = session.get_one(JobRow, job_id)
            return ClaimedJob(
                job_id=job_id,
                kind=row.kind,
                payload=row.payload,
                token=token,
                attempt=row.attempts,
                max_attempts=row.max_attempts,
            )

    def complete(self, job_id: str, token: str, now: float | None = None) -> bool:
        with self._db.write() as session:
            return complete_job(session, job_id, token, _clock(now))

    def fail(
        self,
        job_id: str,
        token: str,
        error: str,
        retry_in_s: float | None,
        now: float | None = None,
    ) -> bool:
        """Queues the next attempt, or buries the job when there is none left or `retry_in_s` is
        None.

        False when the token is not the holder's any more.
        """
        at = _clock(now)
        with self._db.write() as session:
            row = session.get(JobRow, job_id, with_for_update=True)
            if row is None or row.state != "running" or row.token != token:
                return False
            error = clean_text(error)
            if retry_in_s is None or row.attempts >= row.max_attempts:
                _bury(session, row, error, at)
            else:
                row.state, row.token, row.lease_until = "queued", None, None
                row.run_after, row.sent_at, row.error = at + retry_in_s, None, error
            return True

    def counts(self) -> dict[str, int]:
        """By state."""
        query = select(JobRow.state, func.count()).group_by(JobRow.state)
        with self._db.read() as session:
            return {row[0]: row[1] for row in session.execute(query)}

    def _bury_spent(self, job_id: str, at: float) -> None:
        with self._db.write() as session:
            query = select(JobRow).where(JobRow.job_id == job_id, _is_abandoned(at), _is_spent())
            row = session.scalars(query.with_for_update()).one_or_none()
            if row is not None:
                error = f"lease ran out {row.attempts} times; the worker dies while doing it"
                _bury(session, row, error, at)


def _bury(session: Session, row: JobRow, error: str, at: float) -> None:
    row.state, row.error, row.finished_at = "dead", error, at
    row.token, row.lease_until = None, None
    if row.kind == SCORE:
        # an unscored trajectory would hold back its whole group for ever
        give_up = (
            update(TrajectoryRow)
            .where(
                TrajectoryRow.trajectory_id == str(row.payload["trajectory_id"]),
                TrajectoryRow.state == "pending",
            )
            .values(state="ineligible", state_reason=f"reward: {error}"[:500], updated_at=at)
        )
        changed(session, give_up)


def _is_abandoned(at: float) -> ColumnElement[bool]:
    return and_(JobRow.state == "running", JobRow.lease_until < at)


def _is_spent() -> ColumnElement[bool]:
    return JobRow.attempts >= JobRow.max_attempts


def _clock(now: float | None) -> float:
    return time.time() if now is None else now
