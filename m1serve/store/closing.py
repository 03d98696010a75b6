"""Closes sessions: builds trajectories and enqueues scoring, in the caller's transaction."""

from __future__ import annotations

from collections.abc import Sequence, Set

from sqlalchemy import and_, insert, or_, select, update
from sqlalchemy.orm import Session

from m1serve.store.claims import CLAIMABLE
from m1serve.store.database import Database, changed
from m1serve.store.facts import load_facts, save_links, with_superseded
from m1serve.store.jobs import SCORE, job_row
from m1serve.store.rewards import (
    FEEDBACK_METRIC,
    FEEDBACK_SCORER,
    Verdict,
    set_state,
    store_verdict,
)
from m1serve.store.tables import (
    FeedbackRow,
    RewardRow,
    SessionRow,
    TrajectoryRow,
    TrajectoryTurnRow,
    TurnRow,
)
from m1serve.store.trajectories import (
    NOT_DELIVERED,
    SIDE_REQUEST,
    TURN_LOST,
    Segment,
    assemble,
    trajectory_id,
    why_not_trainable,
)
from m1serve.store.work_tables import JobRow
from m1serve.types import Reward


class SessionCloser:
    """Works inside one transaction."""

    def __init__(
        self, db: Database, session: Session, *, now: float, job_max_attempts: int
    ) -> None:
        self._db = db
        self._session = session
        self._now = now
        self._job_max_attempts = job_max_attempts

    def close(self, row: SessionRow, reason: str, *, without: Set[str] = frozenset()) -> None:
        """Builds the trajectories of its turns, but for those `without`. A closed session stays as
        it is.
        """
        if row.closed_at is None:
            row.closed_at, row.close_reason = self._now, reason
            self.build(row, without=without)

    def build(self, row: SessionRow, *, without: Set[str] = frozenset()) -> None:
        """Trajectories of the turns that have none: all at the close, late ones after it."""
        own = select(TrajectoryTurnRow.turn_id).join(TrajectoryRow)
        included = set(
            self._session.scalars(
                own.where(
                    TrajectoryRow.session_key == row.session_key, ~TrajectoryTurnRow.is_context
                )
            )
        )
        stored = [t for t in load_facts(self._session, row.session_key) if t.turn_id not in without]
        turns = with_superseded(stored)
        save_links(self._session, stored, turns)
        segments = assemble(turns, included)
        if not segments:
            return
        count = select(TrajectoryRow.segment).where(TrajectoryRow.session_key == row.session_key)
        first = len(self._session.scalars(count).all())
        built = [self._values(row, s, first + index) for index, s in enumerate(segments)]
        self._session.execute(insert(TrajectoryRow), built)
        links = [link for s in segments for link in _links(row.session_key, s)]
        self._session.execute(insert(TrajectoryTurnRow), links)
        self._enqueue(built)
        self.apply_feedback([str(values["trajectory_id"]) for values in built])

    def mark_incomplete(self, row: SessionRow) -> None:
        """A turn of the session was lost: nothing of it that is not trained yet ever will be."""
        row.is_incomplete = True
        stop = (
            update(TrajectoryRow)
            .where(
                TrajectoryRow.session_key == row.session_key,
                or_(
                    TrajectoryRow.state.in_(("pending", *CLAIMABLE)),
                    # a reward that still comes would make it eligible
                    (TrajectoryRow.state == "ineligible") & TrajectoryRow.is_trainable,
                ),
            )
            .values(
                is_trainable=False,
                state="ineligible",
                state_reason=TURN_LOST,
                updated_at=self._now,
            )
        )
        changed(self._session, stop)

    def recheck_delivery(self, row: SessionRow) -> None:
        """After news of a delivery that came later than the end of a closed session."""
        if row.closed_at is None:
            return
        facts = {turn.turn_id: turn for turn in load_facts(self._session, row.session_key)}
        query = select(TrajectoryRow).where(
            TrajectoryRow.session_key == row.session_key,
            TrajectoryRow.state == "ineligible",
            TrajectoryRow.state_reason == NOT_DELIVERED,
        )
        for trajectory in self._session.scalars(query.with_for_update()).all():
            own = select(TrajectoryTurnRow.turn_id).where(
                TrajectoryTurnRow.trajectory_id == trajectory.trajectory_id,
                ~TrajectoryTurnRow.is_context,
            )
            ids = self._session.scalars(own.order_by(TrajectoryTurnRow.position))
            segment = Segment(turns=tuple(facts[turn_id] for turn_id in ids), context=())
            reason = _why_not_trainable(segment, row)
            trajectory.is_trainable, trajectory.state_reason = reason == "", reason
            trajectory.updated_at = self._now
            set_state(trajectory)
        self.build(row)

    def apply_feedback(self, trajectory_ids: Sequence[str]) -> None:
        """The newest feedback reward, for trajectories that no scorer will judge."""
        query = (
            select(TrajectoryRow)
            .where(
                TrajectoryRow.trajectory_id.in_(trajectory_ids),
                TrajectoryRow.task_id.is_(None),
            )
            .with_for_update()
        )
        for row in self._session.scalars(query).all():
            feedback = _feedback_on(self._session, row)
            if feedback is not None and not self._is_said(row, feedback):
                reward = Reward(value=feedback.value, evidence=feedback.feedback_id)
                verdict = Verdict(scorer=FEEDBACK_SCORER, scorer_version="1", reward=reward)
                store_verdict(self._session, row, verdict, self._now)

    def _is_said(self, row: TrajectoryRow, feedback: FeedbackRow) -> bool:
        """That feedback is the trajectory's reward already."""
        said = select(RewardRow.evidence).where(
            RewardRow.trajectory_id == row.trajectory_id,
            RewardRow.scorer == FEEDBACK_SCORER,
            RewardRow.is_current,
        )
        return self._session.scalars(said).one_or_none() == feedback.feedback_id

    def _values(self, row: SessionRow, segment: Segment, number: int) -> dict[str, object]:
        reason = _why_not_trainable(segment, row)
        head, turns = segment.head, segment.turns
        min_version, max_version = segment.versions
        return {
            "trajectory_id": trajectory_id(row.session_key, segment),
            "session_key": row.session_key,
            "segment": number,
            "session_id": row.session_id,
            "tenant_id": row.tenant_id,
            "key_id": head.key_id,
            "group_key": segment.group_key,
            "task_id": segment.task_id,
            "model_id": head.model_id,
            "mode": segment.mode.value,
            "consent": all(t.consent for t in turns),
            "history_rule": head.history_rule.value,
            "num_turns": len(turns),
            "num_prompt": sum(t.num_prompt for t in turns),
            "num_completion": sum(t.num_completion for t in turns),
            "num_trainable": sum(t.num_trainable for t in turns),
            "min_version": min_version,
            "max_version": max_version,
            "is_trainable": reason == "",
            "state": "ineligible" if reason else "pending",
            "state_reason": reason,
            "created_at": head.created_at,
            "updated_at": self._now,
            "retention_until": row.retention_until,
        }

    def _enqueue(self, built: Sequence[dict[str, object]]) -> None:
        jobs = [
            job_row(
                SCORE,
                f"{SCORE}:{values['trajectory_id']}",
                {"trajectory_id": values["trajectory_id"]},
                now=self._now,
                max_attempts=self._job_max_attempts,
            )
            for values in built
            if values["task_id"] is not None and values["state_reason"] != SIDE_REQUEST
        ]
        self._db.insert_new(self._session, JobRow, jobs)


def _feedback_on(session: Session, row: TrajectoryRow) -> FeedbackRow | None:
    """The newest reward given to it, one of its turns or requests, or its session."""
    own = (
        select(TurnRow)
        .join(TrajectoryTurnRow)
        .where(TrajectoryTurnRow.trajectory_id == row.trajectory_id, ~TrajectoryTurnRow.is_context)
    )
    is_of_session = and_(
        FeedbackRow.session_id == row.session_id,
        FeedbackRow.turn_id.is_(None),
        FeedbackRow.request_id.is_(None),
    )
    query = select(FeedbackRow).where(
        FeedbackRow.tenant_id == row.tenant_id,
        FeedbackRow.metric == FEEDBACK_METRIC,
        or_(
            FeedbackRow.turn_id.in_(own.with_only_columns(TurnRow.turn_id)),
            FeedbackRow.request_id.in_(own.with_only_columns(TurnRow.request_id)),
            is_of_session,
        ),
    )
    newest = query.order_by(FeedbackRow.at.desc(), FeedbackRow.feedback_id).limit(1)
    return session.scalars(newest).one_or_none()


def _why_not_trainable(segment: Segment, row: SessionRow) -> str:
    return why_not_trainable(
        segment, is_incomplete=row.is_incomplete, is_ambiguous=row.is_ambiguous
    )


def _links(session_key: str, segment: Segment) -> list[dict[str, object]]:
    name = trajectory_id(session_key, segment)
    num_context = len(segment.context)
    return [
        {
            "trajectory_id": name,
            "position": position,
            "turn_id": turn.turn_id,
            "is_context": position < num_context,
        }
        for position, turn in enumerate(segment.context + segment.turns)
    ]
