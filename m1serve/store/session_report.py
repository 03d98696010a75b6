"""A session as its client may see it: turns with their drift, trajectories with their rewards."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from m1serve.store.captured import session_key
from m1serve.store.session_rows import is_about_session
from m1serve.store.tables import (
    FeedbackRow,
    RewardRow,
    SessionRow,
    TrajectoryRow,
    TurnRow,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReport:
    turn_id: str
    completion_id: str
    """Without the prefix that names its kind."""
    created_at: float
    choice: int
    parent_turn_id: str | None
    drift: str
    session_source: str
    superseded_by: str | None
    num_prompt: int
    num_completion: int
    num_trainable: int
    weights_versions: tuple[str, ...]
    stop: str
    was_delivered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardReport:
    scorer: str
    scorer_version: str
    value: float | None
    status: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryReport:
    trajectory_id: str
    state: str
    state_reason: str
    num_turns: int
    num_trainable: int
    reward: float | None
    rewards: tuple[RewardReport, ...]
    """Current ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackReport:
    feedback_id: str
    turn_id: str | None
    completion_id: str | None
    """Without the prefix that names its kind."""
    metric: str
    value: float
    source: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReport:
    session_id: str
    model_id: str
    mode: str
    group_key: str | None
    task_id: str | None
    opened_at: float
    last_seen_at: float
    closed_at: float | None
    close_reason: str | None
    is_incomplete: bool
    """Capture lost a turn: none of it is trained."""
    is_ambiguous: bool
    """Nobody can say which conversation it goes on: none of it is trained."""
    erased_at: float | None
    turns: tuple[TurnReport, ...]
    trajectories: tuple[TrajectoryReport, ...]
    feedback: tuple[FeedbackReport, ...]


def session_report(session: Session, tenant_id: str, session_id: str) -> SessionReport | None:
    """None when the ledger has no such session of this tenant."""
    key = session_key(tenant_id, session_id)
    row = session.get(SessionRow, key)
    if row is None:
        return None
    about = select(FeedbackRow).where(is_about_session(row))
    given = session.scalars(about.order_by(FeedbackRow.at, FeedbackRow.feedback_id))
    return SessionReport(
        session_id=row.session_id,
        model_id=row.model_id,
        mode=row.mode,
        group_key=row.group_key,
        task_id=row.task_id,
        opened_at=row.opened_at,
        last_seen_at=row.last_seen_at,
        closed_at=row.closed_at,
        close_reason=row.close_reason,
        is_incomplete=row.is_incomplete,
        is_ambiguous=row.is_ambiguous,
        erased_at=row.erased_at,
        turns=_turns(session, key),
        trajectories=_trajectories(session, key),
        feedback=tuple(_feedback(one) for one in given),
    )


def _turns(session: Session, key: str) -> tuple[TurnReport, ...]:
    """Without their tokens: a session may have millions."""
    names = [name for name in TurnReport.__dataclass_fields__ if hasattr(TurnRow, name)]
    columns = [getattr(TurnRow, name) for name in names]
    query = (
        select(TurnRow.request_id, TurnRow.version_spans, *columns)
        .where(TurnRow.session_key == key)
        .order_by(TurnRow.created_at, TurnRow.request_id, TurnRow.choice, TurnRow.turn_id)
    )
    turns = []
    for request_id, spans, *values in session.execute(query):
        versions = dict.fromkeys(str(span[2]) for span in spans)
        known = dict(zip(names, values, strict=True))
        turns.append(
            TurnReport(completion_id=request_id, weights_versions=tuple(versions), **known)
        )
    return tuple(turns)


def _trajectories(session: Session, key: str) -> tuple[TrajectoryReport, ...]:
    query = select(TrajectoryRow).where(TrajectoryRow.session_key == key)
    rows = session.scalars(query.order_by(TrajectoryRow.segment)).all()
    ids = [row.trajectory_id for row in rows]
    current = select(RewardRow).where(RewardRow.trajectory_id.in_(ids), RewardRow.is_current)
    rewards: dict[str, list[RewardReport]] = {}
    for reward in session.scalars(current.order_by(RewardRow.reward_id)):
        rewards.setdefault(reward.trajectory_id, []).append(
            RewardReport(
                scorer=reward.scorer,
                scorer_version=reward.scorer_version,
                value=reward.value,
                status=reward.status,
                at=reward.created_at,
            )
        )
    return tuple(
        TrajectoryReport(
            trajectory_id=row.trajectory_id,
            state=row.state,
            state_reason=row.state_reason,
            num_turns=row.num_turns,
            num_trainable=row.num_trainable,
            reward=row.reward,
            rewards=tuple(rewards.get(row.trajectory_id, ())),
        )
        for row in rows
    )


def _feedback(row: FeedbackRow) -> FeedbackReport:
    return FeedbackReport(
        feedback_id=row.feedback_id,
        turn_id=row.turn_id,
        completion_id=row.request_id,
        metric=row.metric,
        value=row.value,
        source=row.source,
        at=row.at,
    )
