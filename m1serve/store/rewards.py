"""Rewards of trajectories. A newer one of the same scorer supersedes the older; nothing is
overwritten.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from m1serve.errors import StoreError
from m1serve.store.database import Database, changed, clean_text
from m1serve.store.jobs import complete_job
from m1serve.store.tables import RewardRow, TrajectoryRow
from m1serve.types import Reward, RewardStatus

FEEDBACK_SCORER = "feedback"
FEEDBACK_METRIC = "reward"
"""Feedback of this metric is the reward of a trajectory that has no task to be scored by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReward:
    reward_id: int
    trajectory_id: str
    scorer: str
    scorer_version: str
    value: float | None
    status: RewardStatus
    components: Mapping[str, float]
    evidence: str
    supersedes: int | None
    is_current: bool
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A reward and whose it is."""

    scorer: str
    scorer_version: str
    reward: Reward
    job_id: str | None = None


class Rewards:
    def __init__(self, db: Database) -> None:
        self._db = db

    def record(
        self,
        trajectory_id: str,
        *,
        scorer: str,
        scorer_version: str,
        reward: Reward,
        job: tuple[str, str] | None,
        now: float | None = None,
    ) -> bool:
        """One transaction with the completion of `job` (id, token); False, and nothing stored, when
        it was lost.

        A trainable trajectory becomes eligible when there is a value, ineligible otherwise; one
        that is claimed or trained already keeps its state.
        """
        if reward.value is not None and not math.isfinite(reward.value):
            raise StoreError(
                f"reward of {trajectory_id} is {reward.value}; wanted a finite number, "
                "or None when it could not be computed"
            )
        at = time.time() if now is None else now
        verdict = Verdict(
            scorer=scorer,
            scorer_version=scorer_version,
            reward=reward,
            job_id=job[0] if job is not None else None,
        )
        with self._db.write() as session:
            if job is not None and not complete_job(session, job[0], job[1], at):
                return False
            row = session.get(TrajectoryRow, trajectory_id, with_for_update=True)
            if row is None:
                raise StoreError(f"no trajectory {trajectory_id!r} to reward")
            store_verdict(session, row, verdict, at)
            return True

    def list(self, trajectory_id: str) -> list[StoredReward]:
        """Oldest first, superseded ones too."""
        query = select(RewardRow).where(RewardRow.trajectory_id == trajectory_id)
        with self._db.read() as session:
            return [_stored(row) for row in session.scalars(query.order_by(RewardRow.reward_id))]


def store_verdict(session: Session, row: TrajectoryRow, verdict: Verdict, at: float) -> None:
    """Inside a transaction that holds the trajectory's row."""
    reward = verdict.reward
    older = session.execute(
        select(RewardRow.reward_id).where(
            RewardRow.trajectory_id == row.trajectory_id,
            RewardRow.scorer == verdict.scorer,
            RewardRow.is_current,
        )
    ).scalar_one_or_none()
    if older is not None:
        outdated = update(RewardRow).where(RewardRow.reward_id == older).values(is_current=False)
        changed(session, outdated)
    session.add(
        RewardRow(
            trajectory_id=row.trajectory_id,
            scorer=verdict.scorer,
            scorer_version=verdict.scorer_version,
            value=reward.value,
            status=reward.status.value,
            components=dict(reward.components),
            evidence=clean_text(reward.evidence),
            job_id=verdict.job_id,
            supersedes=older,
            is_current=True,
            created_at=at,
        )
    )
    row.reward, row.reward_status, row.updated_at = reward.value, reward.status.value, at
    set_state(row)


def set_state(row: TrajectoryRow) -> None:
    """What its reward makes of a trajectory that nobody claimed."""
    if not row.is_trainable or row.state not in ("pending", "eligible", "ineligible"):
        return
    if row.reward is not None:
        row.state, row.state_reason = "eligible", ""
    elif row.reward_status is not None:
        row.state, row.state_reason = "ineligible", f"reward: {row.reward_status}"
    else:
        row.state, row.state_reason = "pending", ""


def _stored(row: RewardRow) -> StoredReward:
    return StoredReward(
        reward_id=row.reward_id,
        trajectory_id=row.trajectory_id,
        scorer=row.scorer,
        scorer_version=row.scorer_version,
        value=row.value,
        status=RewardStatus(row.status),
        components={name: float(str(value)) for name, value in row.components.items()},
        evidence=row.evidence,
        supersedes=row.supersedes,
        is_current=row.is_current,
        created_at=row.created_at,
    )
