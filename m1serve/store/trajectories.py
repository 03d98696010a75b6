"""Turns of a session into trajectories: one per leaf chain, every turn in exactly one of them.
Pure.

A fork, a side request or another choice of n begins its own trajectory; the turns before a fork are
its context.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set
from dataclasses import dataclass

from m1serve.store.drift import CONTINUING, TurnFacts
from m1serve.types import Drift, Mode, StopCause

SIDE_REQUEST = "drift: side request"
"""Not part of the session's task: neither scored by it nor trained on."""
NOT_DELIVERED = "delivery: the client never had an answer"
TURN_LOST = "capture: a turn of the session was lost"
AMBIGUOUS = "session: ambiguous"
"""Several conversations had the history it goes on from, and nothing told them apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    turns: tuple[TurnFacts, ...]
    context: tuple[TurnFacts, ...]

    @property
    def head(self) -> TurnFacts:
        return self.turns[0]

    @property
    def group_key(self) -> str | None:
        """The client's; else the choices of one request are a group of their own."""
        head = self.head
        if head.group_key is None and head.num_choices > 1:
            return f"request:{head.request_id}"
        return head.group_key

    @property
    def task_id(self) -> str | None:
        return next((t.task_id for t in self.context + self.turns if t.task_id is not None), None)

    @property
    def mode(self) -> Mode:
        is_train = all(t.mode is Mode.TRAIN for t in self.turns)
        return Mode.TRAIN if is_train else Mode.EVAL

    @property
    def versions(self) -> tuple[int | None, int | None]:
        low = [t.min_version for t in self.turns if t.min_version is not None]
        high = [t.max_version for t in self.turns if t.max_version is not None]
        return min(low, default=None), max(high, default=None)


def assemble(turns: Sequence[TurnFacts], included: Set[str]) -> list[Segment]:
    """`turns` in order, linked and with their superseded ones marked; those `included` have a
    trajectory already.
    """
    live = [t for t in turns if t.superseded_by is None]
    by_id = {t.turn_id: t for t in turns}
    parents = {t.parent_turn_id for t in live}
    heirs: dict[str, TurnFacts] = {}
    for turn in live:
        parent = turn.parent_turn_id
        if parent is None or parent in included or turn.turn_id in included:
            continue
        if turn.drift not in CONTINUING or parent not in by_id:
            continue
        heir = heirs.get(parent)
        # of the choices of one request the one that was built upon carries on
        is_better = (
            heir is not None
            and heir.request_id == turn.request_id
            and heir.turn_id not in parents
            and turn.turn_id in parents
        )
        if heir is None or is_better:
            heirs[parent] = turn
    carried = {heir.turn_id for heir in heirs.values()}
    heads = [t for t in live if t.turn_id not in included and t.turn_id not in carried]
    return [Segment(turns=_chain(t, heirs), context=_context(t, by_id)) for t in heads]


def why_not_trainable(segment: Segment, *, is_incomplete: bool, is_ambiguous: bool = False) -> str:
    """'' when only the reward is still to decide."""
    turns = segment.turns
    if segment.mode is not Mode.TRAIN:
        return "mode: eval"
    if not all(t.consent for t in turns):
        return "consent: withheld"
    for cause in (StopCause.ABORT, StopCause.ERROR):
        if any(t.stop is cause for t in turns):
            return f"stop: {cause.value}"
    if not _was_seen(turns):
        return NOT_DELIVERED
    if segment.head.drift is Drift.SIDE:
        return SIDE_REQUEST
    if is_incomplete:
        return TURN_LOST
    if is_ambiguous:
        return AMBIGUOUS
    if sum(t.num_trainable for t in turns) == 0:
        return "sampling: no trainable token"
    return ""


def trajectory_id(session_key: str, segment: Segment) -> str:
    """Follows from what it holds, so that building it twice is building it once."""
    name = f"{session_key}/{segment.head.turn_id}"
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _was_seen(turns: Sequence[TurnFacts]) -> bool:
    """Whether every answer was: delivered, or else repeated by the prompt that followed it."""
    followers = [*turns[1:], None]
    return all(
        turn.was_delivered or (next_ is not None and next_.drift is Drift.EXTEND)
        for turn, next_ in zip(turns, followers, strict=True)
    )


def _chain(head: TurnFacts, heirs: dict[str, TurnFacts]) -> tuple[TurnFacts, ...]:
    chain = [head]
    while chain[-1].turn_id in heirs:
        chain.append(heirs[chain[-1].turn_id])
    return tuple(chain)


def _context(head: TurnFacts, by_id: dict[str, TurnFacts]) -> tuple[TurnFacts, ...]:
    context: list[TurnFacts] = []
    parent = by_id.get(head.parent_turn_id or "")
    while parent is not None:
        context.append(parent)
        parent = by_id.get(parent.parent_turn_id or "")
    return tuple(reversed(context))
