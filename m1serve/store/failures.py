"""Data that runs fail with: given back once, then burned, so that it cannot block training."""

from __future__ import annotations

import time

from sqlalchemy import func, insert, select, update
from sqlalchemy.orm import Session

from m1serve.store.database import changed, chunks
from m1serve.store.tables import TrajectoryRow
from m1serve.store.work_tables import RunTrajectoryRow

MAX_FAILED_RUNS = 2
FAILED = "failed"
HELD = ("claimed", "eligible", "released")


def count_failure(session: Session, run_id: str, reason: str) -> None:
    """Notes that this run failed with what it holds or gave back; call it before the release."""
    held = (
        select(TrajectoryRow.trajectory_id)
        .where(TrajectoryRow.claim_run_id == run_id, TrajectoryRow.state == "claimed")
        .order_by(TrajectoryRow.created_at, TrajectoryRow.trajectory_id)
    )
    rows = [
        {"run_id": run_id, "trajectory_id": id_, "position": position, "role": FAILED}
        for position, id_ in enumerate(session.scalars(held))
    ]
    if rows:
        session.execute(insert(RunTrajectoryRow), rows)
    given_back = (
        update(RunTrajectoryRow)
        .where(RunTrajectoryRow.run_id == run_id, RunTrajectoryRow.role == "released")
        .values(role=FAILED)
    )
    changed(session, given_back)
    _burn(session, run_id, reason)


def _burn(session: Session, run_id: str, reason: str) -> None:
    of_run = select(RunTrajectoryRow.trajectory_id).where(
        RunTrajectoryRow.run_id == run_id, RunTrajectoryRow.role == FAILED
    )
    hopeless = (
        select(RunTrajectoryRow.trajectory_id)
        .where(RunTrajectoryRow.role == FAILED, RunTrajectoryRow.trajectory_id.in_(of_run))
        .group_by(RunTrajectoryRow.trajectory_id)
        .having(func.count() >= MAX_FAILED_RUNS)
    )
    why = f"{MAX_FAILED_RUNS} runs failed with it, the last of: {reason}"[:500]
    for part in chunks(list(session.scalars(hopeless))):
        burn = (
            update(TrajectoryRow)
            .where(TrajectoryRow.trajectory_id.in_(part), TrajectoryRow.state.in_(HELD))
            .values(state="burned", state_reason=why, claim_run_id=None, updated_at=time.time())
        )
        changed(session, burn)
