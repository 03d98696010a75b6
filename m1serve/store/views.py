"""Reads the ledger back: turns exactly as they were sampled, trajectories with their turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from m1serve.errors import StoreError
from m1serve.store.blobs import unpack_flags, unpack_floats, unpack_ids
from m1serve.store.codec import sampling_from_dict
from m1serve.store.database import chunks
from m1serve.store.prompts import join_prompt, load_blocks
from m1serve.store.records import SessionSource, TurnRecord
from m1serve.store.tables import TrajectoryRow, TrajectoryTurnRow, TurnRow
from m1serve.types import HistoryRule, Mode, RewardStatus, StopCause, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryView:
    trajectory_id: str
    session_id: str
    tenant_id: str
    group_key: str | None
    """Chosen by the tenant: only (tenant_id, group_key) names a group."""
    task_id: str | None
    mode: Mode
    model_id: str
    history_rule: HistoryRule
    turns: tuple[TurnRecord, ...]
    """Its own; every sampled token belongs to one trajectory only."""
    context: tuple[TurnRecord, ...]
    """Earlier turns that belong to another trajectory (before a fork): for scorers, never for
    training.
    """
    state: str
    """pending | eligible | claimed | consumed | released | burned | ineligible"""
    state_reason: str
    reward: float | None
    reward_status: RewardStatus | None
    created_at: float

    @property
    def conversation(self) -> tuple[TurnRecord, ...]:
        return self.context + self.turns


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySummary:
    """A trajectory without its tokens, for lists."""

    trajectory_id: str
    session_id: str
    tenant_id: str
    group_key: str | None
    task_id: str | None
    mode: Mode
    model_id: str
    num_turns: int
    num_prompt: int
    num_completion: int
    num_trainable: int
    min_version: int | None
    max_version: int | None
    state: str
    state_reason: str
    reward: float | None
    reward_status: RewardStatus | None
    created_at: float


def load_turns(session: Session, turn_ids: Sequence[str]) -> dict[str, TurnRecord]:
    """By id, without those that were erased."""
    rows: list[TurnRow] = []
    for part in chunks(turn_ids):
        rows += session.scalars(select(TurnRow).where(TurnRow.turn_id.in_(part)))
    rows = [row for row in rows if row.erased_at is None]
    blocks = load_blocks(session, [row.prompt_blocks for row in rows])
    return {
        row.turn_id: _turn(row, join_prompt(row.prompt_blocks, row.prompt_tail, blocks))
        for row in rows
    }


def load_trajectories(
    session: Session,
    *,
    trajectory_ids: Sequence[str] | None = None,
    claimed_by: str | None = None,
) -> list[TrajectoryView]:
    """Either the given ones or a run's frozen set, oldest first, the same at every call; none that
    was erased.
    """
    whole = select(TrajectoryRow).where(TrajectoryRow.erased_at.is_(None))
    query = whole.order_by(TrajectoryRow.created_at, TrajectoryRow.trajectory_id)
    rows: list[TrajectoryRow] = []
    if claimed_by is not None:
        rows += session.scalars(query.where(TrajectoryRow.claim_run_id == claimed_by))
    for part in chunks(trajectory_ids or ()):
        rows += session.scalars(query.where(TrajectoryRow.trajectory_id.in_(part)))
    links: dict[str, list[TrajectoryTurnRow]] = {row.trajectory_id: [] for row in rows}
    for part in chunks(list(links)):
        of_part = select(TrajectoryTurnRow).where(TrajectoryTurnRow.trajectory_id.in_(part))
        for link in session.scalars(of_part.order_by(TrajectoryTurnRow.position)):
            links[link.trajectory_id].append(link)
    wanted = {link.turn_id for chain in links.values() for link in chain}
    turns = load_turns(session, sorted(wanted))
    return [_trajectory(row, links[row.trajectory_id], turns) for row in rows]


def summary(row: TrajectoryRow) -> TrajectorySummary:
    return TrajectorySummary(
        trajectory_id=row.trajectory_id,
        session_id=row.session_id,
        tenant_id=row.tenant_id,
        group_key=row.group_key,
        task_id=row.task_id,
        mode=Mode(row.mode),
        model_id=row.model_id,
        num_turns=row.num_turns,
        num_prompt=row.num_prompt,
        num_completion=row.num_completion,
        num_trainable=row.num_trainable,
        min_version=row.min_version,
        max_version=row.max_version,
        state=row.state,
        state_reason=row.state_reason,
        reward=row.reward,
        reward_status=_status(row.reward_status),
        created_at=row.created_at,
    )


def _trajectory(
    row: TrajectoryRow, links: Sequence[TrajectoryTurnRow], turns: dict[str, TurnRecord]
) -> TrajectoryView:
    return TrajectoryView(
        trajectory_id=row.trajectory_id,
        session_id=row.session_id,
        tenant_id=row.tenant_id,
        group_key=row.group_key,
        task_id=row.task_id,
        mode=Mode(row.mode),
        model_id=row.model_id,
        history_rule=HistoryRule(row.history_rule),
        turns=tuple(turns[link.turn_id] for link in links if not link.is_context),
        # a session that went on after it was erased has no tokens of the turns before
        context=tuple(
            turns[link.turn_id] for link in links if link.is_context and link.turn_id in turns
        ),
        state=row.state,
        state_reason=row.state_reason,
        reward=row.reward,
        reward_status=_status(row.reward_status),
        created_at=row.created_at,
    )


def _turn(row: TurnRow, prompt_ids: tuple[int, ...]) -> TurnRecord:
    if len(prompt_ids) != row.num_prompt:
        raise StoreError(
            f"turn {row.turn_id}: {len(prompt_ids)} prompt ids stored, {row.num_prompt} expected"
        )
    sampled = row.sampled_logprobs
    return TurnRecord(
        turn_id=row.turn_id,
        request_id=row.request_id,
        session_id=row.session_id,
        group_key=row.group_key,
        task_id=row.task_id,
        tenant_id=row.tenant_id,
        key_id=row.key_id,
        model_id=row.model_id,
        mode=Mode(row.mode),
        consent=row.consent,
        created_at=row.created_at,
        choice=row.choice,
        num_choices=row.num_choices,
        history_rule=HistoryRule(row.history_rule),
        request_hash=row.request_hash,
        retry_count=row.retry_count,
        prompt_ids=prompt_ids,
        completion_ids=unpack_ids(row.completion),
        logprobs=unpack_floats(row.logprobs),
        sampled_logprobs=None if sampled is None else unpack_floats(sampled),
        token_flags=unpack_flags(row.token_flags),
        version_spans=tuple(_span(span) for span in row.version_spans),
        sampling=sampling_from_dict(row.sampling),
        stop=StopCause(row.stop),
        stop_detail=row.stop_detail,
        finish_reason=row.finish_reason,
        was_delivered=row.was_delivered,
        cached_tokens=row.cached_tokens,
        tokenizer_digest=row.tokenizer_digest,
        template_digest=row.template_digest,
        numerics_digest=row.numerics_digest,
        ttft_ms=row.ttft_ms,
        total_ms=row.total_ms,
        session_source=SessionSource(row.session_source),
    )


def _span(span: object) -> VersionSpan:
    assert isinstance(span, list)
    return VersionSpan(start=span[0], end=span[1], weights_version=span[2])


def _status(status: str | None) -> RewardStatus | None:
    return None if status is None else RewardStatus(status)
