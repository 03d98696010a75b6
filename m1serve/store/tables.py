"""The ledger's tables: sessions, turns, prompt blocks, trajectories, rewards, feedback, journal
cursors.

Typed declarative rows only; what moves work along (jobs, runs, weights) is in work_tables.py.
Times are Unix seconds, versions are also kept as their number so that ages can be compared.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Double,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

SCHEMA_REVISION = "0002"
"""The Alembic revision this code reads and writes."""

_NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=_NAMING)
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it from the class
        float: Double,
        bytes: LargeBinary,
        dict[str, object]: JSON,
        list[object]: JSON,
    }


class SessionRow(Base):
    __tablename__ = "sessions"
    __table_args__ = (
        UniqueConstraint("tenant_id", "session_id"),
        Index(None, "closed_at", "last_seen_at"),
        Index(None, "tenant_id", "group_key"),
    )

    session_key: Mapped[str] = mapped_column(primary_key=True)
    """Hash of tenant and session id: two tenants may use the same name."""
    tenant_id: Mapped[str]
    session_id: Mapped[str]
    group_key: Mapped[str | None]
    task_id: Mapped[str | None]
    model_id: Mapped[str]
    mode: Mapped[str]
    opened_at: Mapped[float]
    last_seen_at: Mapped[float]
    closed_at: Mapped[float | None]
    close_reason: Mapped[str | None]
    num_turns: Mapped[int]
    is_incomplete: Mapped[bool]
    """Capture lost a record of this session: it is never trained."""
    is_ambiguous: Mapped[bool]
    """Nobody can say which conversation it goes on: it is never trained."""
    retention_until: Mapped[float | None]
    erased_at: Mapped[float | None]


class PromptBlockRow(Base):
    __tablename__ = "prompt_blocks"

    block_id: Mapped[bytes] = mapped_column(primary_key=True)
    """HMAC-SHA256 of the ids under the tenant's key."""
    tenant_id: Mapped[str] = mapped_column(index=True)
    ids: Mapped[bytes]
    num_tokens: Mapped[int]
    created_at: Mapped[float]


class TurnRow(Base):
    __tablename__ = "turns"
    __table_args__ = (
        UniqueConstraint("writer", "seq"),
        Index(None, "session_key", "created_at"),
        Index(None, "request_id"),
    )

    turn_id: Mapped[str] = mapped_column(primary_key=True)
    writer: Mapped[str]
    seq: Mapped[int] = mapped_column(BigInteger)
    request_id: Mapped[str]
    session_key: Mapped[str] = mapped_column(ForeignKey("sessions.session_key"))
    session_id: Mapped[str]
    group_key: Mapped[str | None]
    task_id: Mapped[str | None]
    tenant_id: Mapped[str]
    key_id: Mapped[str]
    model_id: Mapped[str]
    mode: Mapped[str]
    consent: Mapped[bool]
    created_at: Mapped[float]
    ingested_at: Mapped[float]
    retention_until: Mapped[float | None]
    erased_at: Mapped[float | None]
    choice: Mapped[int]
    num_choices: Mapped[int]
    history_rule: Mapped[str]
    request_hash: Mapped[str]
    retry_count: Mapped[int]
    session_source: Mapped[str]

    parent_turn_id: Mapped[str | None]
    drift: Mapped[str]
    shared_tokens: Mapped[int]
    """Leading tokens in common with the parent's prompt and completion."""
    superseded_by: Mapped[str | None]
    """Request id of the retry that the client saw instead."""

    num_prompt: Mapped[int]
    num_completion: Mapped[int]
    num_trainable: Mapped[int]
    prompt_digest: Mapped[bytes]
    full_digest: Mapped[bytes]
    """Of prompt and completion together: what a following prompt may start with."""
    prompt_blocks: Mapped[bytes]
    """Block ids, 32 bytes each, in order."""
    prompt_tail: Mapped[bytes]
    completion: Mapped[bytes]
    logprobs: Mapped[bytes]
    sampled_logprobs: Mapped[bytes | None]
    token_flags: Mapped[bytes]
    version_spans: Mapped[list[object]]
    min_version: Mapped[int | None]
    max_version: Mapped[int | None]
    sampling: Mapped[dict[str, object]]

    stop: Mapped[str]
    stop_detail: Mapped[str | None]
    finish_reason: Mapped[str]
    was_delivered: Mapped[bool]
    cached_tokens: Mapped[int]
    tokenizer_digest: Mapped[str]
    template_digest: Mapped[str]
    numerics_digest: Mapped[str]
    ttft_ms: Mapped[float]
    total_ms: Mapped[float]


class TrajectoryRow(Base):
    __tablename__ = "trajectories"
    __table_args__ = (
        UniqueConstraint("session_key", "segment"),
        Index(None, "model_id", "state", "min_version"),
        Index(None, "tenant_id", "group_key"),
    )

    trajectory_id: Mapped[str] = mapped_column(primary_key=True)
    session_key: Mapped[str] = mapped_column(ForeignKey("sessions.session_key"))
    segment: Mapped[int]
    session_id: Mapped[str]
    tenant_id: Mapped[str]
    key_id: Mapped[str]
    group_key: Mapped[str | None]
    task_id: Mapped[str | None]
    model_id: Mapped[str]
    mode: Mapped[str]
    consent: Mapped[bool]
    history_rule: Mapped[str]
    num_turns: Mapped[int]
    num_prompt: Mapped[int]
    num_completion: Mapped[int]
    num_trainable: Mapped[int]
    min_version: Mapped[int | None]
    max_version: Mapped[int | None]
    is_trainable: Mapped[bool]
    """Nothing but its reward decides whether it may be trained on."""
    state: Mapped[str]
    state_reason: Mapped[str]
    reward: Mapped[float | None]
    reward_status: Mapped[str | None]
    claim_run_id: Mapped[str | None] = mapped_column(index=True)
    created_at: Mapped[float]
    updated_at: Mapped[float]
    retention_until: Mapped[float | None]
    erased_at: Mapped[float | None]


class TrajectoryTurnRow(Base):
    __tablename__ = "trajectory_turns"

    trajectory_id: Mapped[str] = mapped_column(
        ForeignKey("trajectories.trajectory_id"), primary_key=True
    )
    position: Mapped[int] = mapped_column(primary_key=True)
    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.turn_id"), index=True)
    is_context: Mapped[bool]
    """Belongs to another trajectory; here only so that a scorer sees the whole conversation."""


class RewardRow(Base):
    __tablename__ = "rewards"
    __table_args__ = (
        Index(
            "ux_rewards_current",
            "trajectory_id",
            "scorer",
            unique=True,
            sqlite_where=text("is_current"),
            postgresql_where=text("is_current"),
        ),
    )

    reward_id: Mapped[int] = mapped_column(primary_key=True)
    trajectory_id: Mapped[str] = mapped_column(ForeignKey("trajectories.trajectory_id"), index=True)
    scorer: Mapped[str]
    scorer_version: Mapped[str]
    value: Mapped[float | None]
    status: Mapped[str]
    components: Mapped[dict[str, object]]
    evidence: Mapped[str]
    job_id: Mapped[str | None]
    supersedes: Mapped[int | None]
    is_current: Mapped[bool]
    created_at: Mapped[float]


class FeedbackRow(Base):
    __tablename__ = "feedback"
    __table_args__ = (
        Index(None, "tenant_id", "session_id"),
        Index(None, "tenant_id", "request_id"),
    )

    feedback_id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str]
    key_id: Mapped[str]
    at: Mapped[float]
    session_id: Mapped[str | None]
    turn_id: Mapped[str | None]
    request_id: Mapped[str | None]
    source: Mapped[str]
    metric: Mapped[str]
    value: Mapped[float]
    comment: Mapped[str]


class JournalCursorRow(Base):
    __tablename__ = "journal_cursors"

    writer: Mapped[str] = mapped_column(primary_key=True)
    segment: Mapped[int]
    offset: Mapped[int] = mapped_column(BigInteger)
    last_seq: Mapped[int] = mapped_column(BigInteger)
    updated_at: Mapped[float]
