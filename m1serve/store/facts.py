"""Turn facts in and out of the turns table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from m1serve.store.database import changed
from m1serve.store.drift import TurnFacts, find_superseded
from m1serve.store.tables import TurnRow
from m1serve.types import Drift, HistoryRule, Mode, StopCause

_NAMES = tuple(field.name for field in dataclasses.fields(TurnFacts))
_COLUMNS = tuple(getattr(TurnRow, name) for name in _NAMES)


def load_facts(session: Session, session_key: str, *, newest: int | None = None) -> list[TurnFacts]:
    """A session's turns in order; only the `newest` when a number is given."""
    query = select(*_COLUMNS).where(TurnRow.session_key == session_key)
    if newest is not None:
        latest = query.order_by(
            TurnRow.created_at.desc(),
            TurnRow.request_id.desc(),
            TurnRow.choice.desc(),
            TurnRow.turn_id.desc(),
        )
        query = latest.limit(newest)
    turns = [_facts(dict(zip(_NAMES, row, strict=True))) for row in session.execute(query)]
    return sorted(turns, key=lambda t: t.order)


def with_superseded(turns: Sequence[TurnFacts]) -> list[TurnFacts]:
    """The same turns, each saying which retry replaced its request, if any."""
    superseded = find_superseded(turns)
    return [dataclasses.replace(t, superseded_by=superseded.get(t.request_id)) for t in turns]


def save_links(session: Session, before: Sequence[TurnFacts], after: Sequence[TurnFacts]) -> None:
    """Of turns that are in the table already, where they changed."""
    known = {turn.turn_id: turn for turn in before}
    for turn in after:
        if turn.turn_id in known and known[turn.turn_id] != turn:
            link = (
                update(TurnRow)
                .where(TurnRow.turn_id == turn.turn_id)
                .values(
                    parent_turn_id=turn.parent_turn_id,
                    drift=turn.drift.value,
                    shared_tokens=turn.shared_tokens,
                    superseded_by=turn.superseded_by,
                )
            )
            changed(session, link)


def _facts(values: dict[str, object]) -> TurnFacts:
    values["mode"] = Mode(str(values["mode"]))
    values["history_rule"] = HistoryRule(str(values["history_rule"]))
    values["stop"] = StopCause(str(values["stop"]))
    values["drift"] = Drift(str(values["drift"]))
    return TurnFacts(**values)  # type: ignore[arg-type]
