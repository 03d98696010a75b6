"""Erases sessions: tokens, text and names go, rows and numbers stay, and what was trained is told.

Blocks that other turns share stay where they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, delete, func, select, text, update
from sqlalchemy.orm import Session

from m1serve.errors import StoreError
from m1serve.store.audit import AuditEntry, write_audit
from m1serve.store.blobs import pack_ids
from m1serve.store.captured import session_key
from m1serve.store.closing import SessionCloser
from m1serve.store.database import Database, changed, chunks
from m1serve.store.jobs import SCORE
from m1serve.store.prompts import block_names
from m1serve.store.session_rows import is_about_session
from m1serve.store.tables import (
    FeedbackRow,
    PromptBlockRow,
    RewardRow,
    SessionRow,
    TrajectoryRow,
    TurnRow,
)
from m1serve.store.work_tables import JobRow, RunRow, RunTrajectoryRow, WeightsRow

ERASED = "erased"
"""State reason of trajectories that may never be trained for this."""
_FOLLOWS = ("pending", "eligible", "released", "ineligible")
_PART = 50
_NOTHING = pack_ids(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Erasure:
    session_id: str
    tenant_id: str
    erased_at: float
    num_turns: int
    num_blocks: int
    """Prompt blocks that nobody else had."""
    trained_versions: tuple[str, ...]
    """Weights versions that learned from it, and those that were trained on from them."""


def erase_session(
    db: Database, tenant_id: str, session_id: str, *, actor: str, now: float | None = None
) -> Erasure:
    """Erasing again changes nothing and tells the same. StoreError for an unknown session, and
    while a run is being trained with it.
    """
    at = time.time() if now is None else now
    with db.write() as session:
        row = session.get(SessionRow, session_key(tenant_id, session_id), with_for_update=True)
        if row is None:
            raise StoreError(
                f"no session {session_id!r} of tenant {tenant_id!r}; `m1serve trajectories list` "
                "shows those there are"
            )
        _refuse_claimed(session, row)
        # what comes in later is a trajectory of its own then
        SessionCloser(db, session, now=at, job_max_attempts=1).close(row, ERASED)
        session.flush()
        num_turns, num_blocks = 0, 0
        if row.erased_at is None:
            num_turns, num_blocks = _erase(session, row, at)
            row.erased_at = at
            entry = AuditEntry(
                at=at,
                actor=actor,
                action="session.erase",
                subject=row.session_key,
                before=None,
                after=f"{num_turns} turns, {num_blocks} blocks",
                reason="",
            )
            write_audit(session, entry)
        return Erasure(
            session_id=session_id,
            tenant_id=tenant_id,
            erased_at=row.erased_at,
            num_turns=num_turns,
            num_blocks=num_blocks,
            trained_versions=_trained_versions(session, row.session_key),
        )


def expired_sessions(
    session: Session, *, retention_s: float | None, now: float
) -> list[tuple[str, str]]:
    """(tenant, session) of closed sessions that are kept no longer; a session's own limit counts
    before the general one. None that a run is being trained with.
    """
    is_over: ColumnElement[bool] = SessionRow.retention_until < now
    if retention_s is not None:
        is_old = SessionRow.retention_until.is_(None) & (
            SessionRow.last_seen_at < now - retention_s
        )
        is_over = is_over | is_old
    claimed = select(TrajectoryRow.session_key).where(TrajectoryRow.state == "claimed")
    query = (
        select(SessionRow.tenant_id, SessionRow.session_id)
        .where(
            SessionRow.closed_at.is_not(None),
            SessionRow.erased_at.is_(None),
            is_over,
            SessionRow.session_key.not_in(claimed),
        )
        .order_by(SessionRow.last_seen_at, SessionRow.session_key)
        .limit(_PART)
    )
    return [(tenant_id, session_id) for tenant_id, session_id in session.execute(query)]


def _refuse_claimed(session: Session, row: SessionRow) -> None:
    claimed = select(TrajectoryRow.claim_run_id).where(
        TrajectoryRow.session_key == row.session_key, TrajectoryRow.state == "claimed"
    )
    run_id = session.scalars(claimed.limit(1)).first()
    if run_id is not None:
        raise StoreError(
            f"run {run_id} is being trained with session {row.session_id!r}; "
            "erase it when the run has ended"
        )


def _erase(session: Session, row: SessionRow, at: float) -> tuple[int, int]:
    key = row.session_key
    is_left = (TurnRow.session_key == key) & TurnRow.erased_at.is_(None)
    lists = session.scalars(select(TurnRow.prompt_blocks).where(is_left)).all()
    turns = update(TurnRow).where(is_left)
    num_turns = changed(
        session,
        turns.values(
            prompt_blocks=b"",
            prompt_tail=_NOTHING,
            completion=_NOTHING,
            logprobs=_NOTHING,
            sampled_logprobs=None,
            token_flags=_NOTHING,
            prompt_digest=b"",
            full_digest=b"",
            request_hash="",
            stop_detail=None,
            erased_at=at,
        ),
    )
    _lock_blocks(session)
    num_blocks = _drop_blocks(session, row.tenant_id, lists)
    trajectories = update(TrajectoryRow).where(TrajectoryRow.session_key == key)
    changed(session, trajectories.values(erased_at=at, updated_at=at))
    never = trajectories.where(TrajectoryRow.state.in_(_FOLLOWS))
    values = {"is_trainable": False, "state": "ineligible", "state_reason": ERASED}
    changed(session, never.values(**values))
    own = select(TrajectoryRow.trajectory_id).where(TrajectoryRow.session_key == key)
    evidence = update(RewardRow).where(RewardRow.trajectory_id.in_(own))
    changed(session, evidence.values(evidence=""))
    keys = [f"{SCORE}:{name}" for name in session.scalars(own)]
    for part in chunks(keys):
        jobs = update(JobRow).where(JobRow.key.in_(part), JobRow.state.in_(("queued", "running")))
        changed(session, jobs.values(state="dead", token=None, error=ERASED, finished_at=at))
    said = update(FeedbackRow).where(is_about_session(row))
    changed(session, said.values(comment=""))
    return num_turns, num_blocks


def _lock_blocks(session: Session) -> None:
    """A turn that is being ingested may count on a block that only it would still name. SQLite has
    one writer at a time anyway.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("LOCK TABLE prompt_blocks IN SHARE ROW EXCLUSIVE MODE"))


def _drop_blocks(session: Session, tenant_id: str, lists: Sequence[bytes]) -> int:
    """Those of the lists that no turn of the tenant has any more."""
    gone = {name for ids in lists for name in block_names(ids)}
    if not gone:
        return 0
    others = select(TurnRow.prompt_blocks).where(
        TurnRow.tenant_id == tenant_id, func.length(TurnRow.prompt_blocks) > 0
    )
    for ids in session.scalars(others.execution_options(yield_per=1000)):
        gone.difference_update(block_names(ids))
        if not gone:
            return 0
    names = sorted(gone)
    for start in range(0, len(names), 500):
        part = PromptBlockRow.block_id.in_(names[start : start + 500])
        changed(session, delete(PromptBlockRow).where(part))
    return len(names)


def _trained_versions(session: Session, key: str) -> tuple[str, ...]:
    own = select(TrajectoryRow.trajectory_id).where(TrajectoryRow.session_key == key)
    runs = select(RunTrajectoryRow.run_id).where(
        RunTrajectoryRow.trajectory_id.in_(own), RunTrajectoryRow.role == "train"
    )
    learned = select(RunRow.weights_version).where(
        RunRow.run_id.in_(runs), RunRow.weights_version.is_not(None)
    )
    found = {str(name) for name in session.scalars(learned)}
    edge = sorted(found)
    while edge:
        children: set[str] = set()
        for part in chunks(edge):
            query = select(WeightsRow.weights_version).where(WeightsRow.parent.in_(part))
            children.update(session.scalars(query))
        edge = sorted(children - found)
        found |= children
    return tuple(sorted(found, key=lambda name: (len(name), name)))
