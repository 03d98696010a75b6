"""The tables that move work along: jobs, runs, weights, targets, deployments, evals, audit."""

from __future__ import annotations

from sqlalchemy import BigInteger, ForeignKey, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from m1serve.store.tables import Base


class JobRow(Base):
    __tablename__ = "jobs"
    __table_args__ = (
        UniqueConstraint("key"),
        Index(None, "state", "run_after"),
    )

    job_id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    key: Mapped[str]
    payload: Mapped[dict[str, object]]
    state: Mapped[str]
    """queued | running | done | dead"""
    run_after: Mapped[float]
    sent_at: Mapped[float | None]
    lease_until: Mapped[float | None]
    token: Mapped[str | None]
    attempts: Mapped[int]
    max_attempts: Mapped[int]
    error: Mapped[str | None]
    created_at: Mapped[float]
    finished_at: Mapped[float | None]


class RunRow(Base):
    __tablename__ = "runs"
    __table_args__ = (Index(None, "state", "lease_until"),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    model_id: Mapped[str]
    trigger: Mapped[str]
    overrides: Mapped[dict[str, object]]
    state: Mapped[str]
    """requested | running | committed | promoted | rejected | skipped | failed"""
    phase: Mapped[str]
    reason: Mapped[str]
    owner: Mapped[str | None]
    token: Mapped[str | None]
    fence: Mapped[int] = mapped_column(BigInteger)
    """How often it was claimed; the holder of the newest is the only writer."""
    lease_s: Mapped[float]
    lease_until: Mapped[float | None]
    parent_version: Mapped[str | None]
    """Fixed together with the claim set; a resumed run trains the same data from the same weights.
    """
    weights_version: Mapped[str | None]
    claimed_at: Mapped[float | None]
    num_claimed: Mapped[int]
    metrics: Mapped[dict[str, object]]
    requested_at: Mapped[float]
    started_at: Mapped[float | None]
    heartbeat_at: Mapped[float | None]
    finished_at: Mapped[float | None]


class RunTrajectoryRow(Base):
    __tablename__ = "run_trajectories"
    __table_args__ = (
        Index(
            "ux_train_once",
            "trajectory_id",
            unique=True,
            sqlite_where=text("role = 'train'"),
            postgresql_where=text("role = 'train'"),
        ),
    )

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), primary_key=True)
    trajectory_id: Mapped[str] = mapped_column(
        ForeignKey("trajectories.trajectory_id"), primary_key=True
    )
    position: Mapped[int]
    role: Mapped[str]
    """train | released | failed"""


class WeightsRow(Base):
    __tablename__ = "weights"
    __table_args__ = (
        UniqueConstraint("model_id", "number"),
        UniqueConstraint("run_id"),
        Index(
            "ux_weights_active",
            "model_id",
            unique=True,
            sqlite_where=text("state = 'active'"),
            postgresql_where=text("state = 'active'"),
        ),
    )

    weights_version: Mapped[str] = mapped_column(primary_key=True)
    model_id: Mapped[str]
    number: Mapped[int]
    path: Mapped[str]
    parent: Mapped[str | None]
    run_id: Mapped[str | None]
    manifest_digest: Mapped[str]
    state: Mapped[str]
    reason: Mapped[str]
    created_at: Mapped[float]
    updated_at: Mapped[float]


class TargetRow(Base):
    __tablename__ = "targets"

    model_id: Mapped[str] = mapped_column(primary_key=True)
    slot: Mapped[str] = mapped_column(primary_key=True)
    weights_version: Mapped[str] = mapped_column(ForeignKey("weights.weights_version"))
    updated_at: Mapped[float]


class DeploymentRow(Base):
    __tablename__ = "deployments"

    replica: Mapped[str] = mapped_column(primary_key=True)
    slot: Mapped[str] = mapped_column(primary_key=True)
    model_id: Mapped[str] = mapped_column(index=True)
    weights_version: Mapped[str]
    """What serves."""
    wanted_version: Mapped[str]
    """What the replica was asked to load."""
    is_accepted: Mapped[bool]
    reason: Mapped[str]
    report: Mapped[dict[str, object]]
    verified_at: Mapped[float]


class EvalRow(Base):
    __tablename__ = "evals"

    eval_id: Mapped[int] = mapped_column(primary_key=True)
    weights_version: Mapped[str] = mapped_column(index=True)
    suite: Mapped[str]
    family: Mapped[str]
    num: Mapped[int]
    successes: Mapped[int]
    details: Mapped[dict[str, object]]
    created_at: Mapped[float]


class AuditRow(Base):
    __tablename__ = "audit"

    audit_id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float] = mapped_column(index=True)
    actor: Mapped[str]
    action: Mapped[str]
    subject: Mapped[str] = mapped_column(index=True)
    before: Mapped[str | None]
    after: Mapped[str | None]
    reason: Mapped[str]
