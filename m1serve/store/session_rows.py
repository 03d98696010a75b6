"""Session rows as their first record makes them, and as their turns fill them in."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, and_, or_, select

from m1serve.store.captured import CapturedTurn, session_key
from m1serve.store.records import SessionEnded, SessionSource
from m1serve.store.tables import FeedbackRow, SessionRow, TurnRow
from m1serve.types import Mode


def is_about_session(row: SessionRow) -> ColumnElement[bool]:
    """Of feedback: it was given to the session, to one of its turns or to one of its requests."""
    own = TurnRow.session_key == row.session_key
    return and_(
        FeedbackRow.tenant_id == row.tenant_id,
        or_(
            FeedbackRow.session_id == row.session_id,
            FeedbackRow.turn_id.in_(select(TurnRow.turn_id).where(own)),
            FeedbackRow.request_id.in_(select(TurnRow.request_id).where(own)),
        ),
    )


def session_of_turn(turn: CapturedTurn) -> dict[str, object]:
    record = turn.record
    return {
        "session_key": turn.session_key,
        "tenant_id": record.tenant_id,
        "session_id": record.session_id,
        "group_key": record.group_key,
        "task_id": record.task_id,
        "model_id": record.model_id,
        "mode": record.mode.value,
        "opened_at": record.created_at,
        "last_seen_at": record.created_at,
        "num_turns": 0,
        "is_incomplete": False,
        "is_ambiguous": False,
    }


def session_of_end(end: SessionEnded) -> dict[str, object]:
    return {
        "session_key": session_key(end.tenant_id, end.session_id),
        "tenant_id": end.tenant_id,
        "session_id": end.session_id,
        "group_key": None,
        "task_id": None,
        "model_id": "",
        "mode": Mode.TRAIN.value,
        "opened_at": end.at,
        "last_seen_at": end.at,
        "num_turns": 0,
        "is_incomplete": False,
        "is_ambiguous": False,
    }


def update_session(row: SessionRow, new: Sequence[CapturedTurn]) -> None:
    for turn in new:
        record = turn.record
        row.model_id = row.model_id or record.model_id
        row.group_key = row.group_key if row.group_key is not None else record.group_key
        row.task_id = row.task_id if row.task_id is not None else record.task_id
        if record.mode is not Mode.TRAIN:
            row.mode = record.mode.value
        # an erased session that goes on has something to erase again
        row.erased_at = None
        if record.session_source is SessionSource.AMBIGUOUS:
            row.is_ambiguous = True
        row.opened_at = min(row.opened_at, record.created_at)
        row.last_seen_at = max(row.last_seen_at, turn.last_seen_at)
    row.num_turns += len(new)
