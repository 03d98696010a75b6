"""Which trajectories a run trains on, each in at most one committed run; all inside the run's
transaction.
"""

from __future__ import annotations

import time
from typing import Literal

from sqlalchemy import ColumnElement, and_, insert, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, aliased

from m1serve.errors import StoreError
from m1serve.store.database import changed, chunks
from m1serve.store.tables import SessionRow, TrajectoryRow
from m1serve.store.versions import version_number
from m1serve.store.work_tables import RunRow, RunTrajectoryRow

CLAIMABLE = ("eligible", "released")


def claim_set(session: Session, run: RunRow, *, max_groups: int, max_age_versions: int) -> int:
    """Marks whole groups, oldest first, as this run's; returns how many trajectories."""
    assert run.parent_version is not None
    newest = version_number(run.parent_version)
    oldest = newest - max_age_versions
    mine = aliased(TrajectoryRow)
    query = (
        select(mine.trajectory_id, mine.tenant_id, mine.group_key)
        .where(
            mine.model_id == run.model_id,
            mine.state.in_(CLAIMABLE),
            mine.mode == "train",
            mine.consent,
            mine.reward.is_not(None),
            mine.min_version >= oldest,
            mine.max_version <= newest,
            ~_has_open_session(mine),
            ~_has_unready_member(mine, oldest, newest),
        )
        .order_by(mine.created_at, mine.trajectory_id)
    )
    groups: dict[tuple[str, str], list[str]] = {}
    for trajectory_id, tenant_id, group_key in session.execute(query):
        key = (tenant_id, f"group:{group_key}" if group_key is not None else trajectory_id)
        if key in groups or len(groups) < max_groups:
            groups.setdefault(key, []).append(trajectory_id)
    wanted = [trajectory_id for members in groups.values() for trajectory_id in members]
    now = time.time()
    for part in chunks(wanted):
        take = (
            update(TrajectoryRow)
            .where(TrajectoryRow.trajectory_id.in_(part), TrajectoryRow.state.in_(CLAIMABLE))
            .values(state="claimed", claim_run_id=run.run_id, state_reason="", updated_at=now)
        )
        if changed(session, take) != len(part):
            raise StoreError(
                f"run {run.run_id}: its groups changed while being claimed; claim again"
            )
    return len(wanted)


def commit_claims(session: Session, run: RunRow, now: float) -> None:
    """The unique index is the last line of defence: trained once, never trained again."""
    query = (
        select(TrajectoryRow.trajectory_id)
        .where(TrajectoryRow.claim_run_id == run.run_id, TrajectoryRow.state == "claimed")
        .order_by(TrajectoryRow.created_at, TrajectoryRow.trajectory_id)
    )
    ids = list(session.scalars(query))
    if len(ids) != run.num_claimed:
        raise StoreError(
            f"run {run.run_id} froze {run.num_claimed} trajectories but holds {len(ids)}; "
            "it must not be committed"
        )
    # an earlier run may have trained and released them: its rows stay, ours are new
    rows = [
        {"run_id": run.run_id, "trajectory_id": id_, "position": position, "role": "train"}
        for position, id_ in enumerate(ids)
    ]
    try:
        if rows:
            session.execute(insert(RunTrajectoryRow), rows)
    except IntegrityError as error:
        raise StoreError(
            f"run {run.run_id}: a trajectory is already trained by another committed run "
            f"({error.orig}); nothing was committed"
        ) from error
    consume = (
        update(TrajectoryRow)
        .where(TrajectoryRow.claim_run_id == run.run_id, TrajectoryRow.state == "claimed")
        .values(state="consumed", updated_at=now)
    )
    changed(session, consume)


def release_claims(
    session: Session, run_id: str, state: Literal["eligible", "burned"], reason: str
) -> int:
    """What was claimed but never committed."""
    give_back = (
        update(TrajectoryRow)
        .where(TrajectoryRow.claim_run_id == run_id, TrajectoryRow.state == "claimed")
        .values(state=state, state_reason=reason, claim_run_id=None, updated_at=time.time())
    )
    return changed(session, give_back)


def release_committed(session: Session, run_id: str, how: Literal["release", "burn"]) -> int:
    """What a rejected version was trained on."""
    now = time.time()
    if how == "release":
        free = (
            update(RunTrajectoryRow)
            .where(RunTrajectoryRow.run_id == run_id, RunTrajectoryRow.role == "train")
            .values(role="released")
        )
        changed(session, free)
    state, reason = ("released", "run rejected") if how == "release" else ("burned", "run rejected")
    move = (
        update(TrajectoryRow)
        .where(TrajectoryRow.claim_run_id == run_id, TrajectoryRow.state == "consumed")
        .values(state=state, state_reason=reason, claim_run_id=None, updated_at=now)
    )
    return changed(session, move)


def _has_open_session(mine: type[TrajectoryRow]) -> ColumnElement[bool]:
    return (
        select(SessionRow.session_key)
        .where(
            SessionRow.tenant_id == mine.tenant_id,
            SessionRow.group_key == mine.group_key,
            SessionRow.closed_at.is_(None),
        )
        .exists()
    )


def _has_unready_member(mine: type[TrajectoryRow], oldest: int, newest: int) -> ColumnElement[bool]:
    other = aliased(TrajectoryRow)
    is_out_of_age = or_(other.min_version < oldest, other.max_version > newest)
    return (
        select(other.trajectory_id)
        .where(
            other.tenant_id == mine.tenant_id,
            other.group_key == mine.group_key,
            or_(other.state == "pending", and_(other.state.in_(CLAIMABLE), is_out_of_age)),
        )
        .exists()
    )
