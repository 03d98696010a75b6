"""Jobs, runs, weights and their kin in revision 0001. Frozen like first_ledger.py."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from m1serve.store.migrations.ddl import columns, partial_unique


def create() -> None:
    _audit()
    _deployments()
    _evals()
    _jobs()
    _runs()
    _weights()
    _targets()
    _run_trajectories()


def drop() -> None:
    op.drop_table("run_trajectories")
    op.drop_table("targets")
    op.drop_table("weights")
    op.drop_table("runs")
    op.drop_table("jobs")
    op.drop_table("evals")
    op.drop_table("deployments")
    op.drop_table("audit")


def _audit() -> None:
    op.create_table(
        "audit",
        *columns(sa.Integer(), "audit_id"),
        *columns(sa.Double(), "at"),
        *columns(sa.String(), "actor", "action", "subject"),
        *columns(sa.String(), "before", "after", nullable=True),
        *columns(sa.String(), "reason"),
        sa.PrimaryKeyConstraint("audit_id", name="pk_audit"),
    )
    op.create_index("ix_audit_at", "audit", ["at"])
    op.create_index("ix_audit_subject", "audit", ["subject"])


def _deployments() -> None:
    op.create_table(
        "deployments",
        *columns(sa.String(), "replica", "slot", "model_id", "weights_version", "wanted_version"),
        *columns(sa.Boolean(), "is_accepted"),
        *columns(sa.String(), "reason"),
        *columns(sa.JSON(), "report"),
        *columns(sa.Double(), "verified_at"),
        sa.PrimaryKeyConstraint("replica", "slot", name="pk_deployments"),
    )
    op.create_index("ix_deployments_model_id", "deployments", ["model_id"])


def _evals() -> None:
    op.create_table(
        "evals",
        *columns(sa.Integer(), "eval_id"),
        *columns(sa.String(), "weights_version", "suite", "family"),
        *columns(sa.Integer(), "num", "successes"),
        *columns(sa.JSON(), "details"),
        *columns(sa.Double(), "created_at"),
        sa.PrimaryKeyConstraint("eval_id", name="pk_evals"),
    )
    op.create_index("ix_evals_weights_version", "evals", ["weights_version"])


def _jobs() -> None:
    op.create_table(
        "jobs",
        *columns(sa.String(), "job_id", "kind", "key"),
        *columns(sa.JSON(), "payload"),
        *columns(sa.String(), "state"),
        *columns(sa.Double(), "run_after"),
        *columns(sa.Double(), "sent_at", "lease_until", nullable=True),
        *columns(sa.String(), "token", nullable=True),
        *columns(sa.Integer(), "attempts", "max_attempts"),
        *columns(sa.String(), "error", nullable=True),
        *columns(sa.Double(), "created_at"),
        *columns(sa.Double(), "finished_at", nullable=True),
        sa.PrimaryKeyConstraint("job_id", name="pk_jobs"),
        sa.UniqueConstraint("key", name="uq_jobs_key"),
    )
    op.create_index("ix_jobs_state_run_after", "jobs", ["state", "run_after"])


def _runs() -> None:
    op.create_table(
        "runs",
        *columns(sa.String(), "run_id", "model_id", "trigger"),
        *columns(sa.JSON(), "overrides"),
        *columns(sa.String(), "state", "phase", "reason"),
        *columns(sa.String(), "owner", "token", nullable=True),
        *columns(sa.BigInteger(), "fence"),
        *columns(sa.Double(), "lease_s"),
        *columns(sa.Double(), "lease_until", nullable=True),
        *columns(sa.String(), "parent_version", "weights_version", nullable=True),
        *columns(sa.Double(), "claimed_at", nullable=True),
        *columns(sa.Integer(), "num_claimed"),
        *columns(sa.JSON(), "metrics"),
        *columns(sa.Double(), "requested_at"),
        *columns(sa.Double(), "started_at", "heartbeat_at", "finished_at", nullable=True),
        sa.PrimaryKeyConstraint("run_id", name="pk_runs"),
    )
    op.create_index("ix_runs_state_lease_until", "runs", ["state", "lease_until"])


def _weights() -> None:
    op.create_table(
        "weights",
        *columns(sa.String(), "weights_version", "model_id"),
        *columns(sa.Integer(), "number"),
        *columns(sa.String(), "path"),
        *columns(sa.String(), "parent", "run_id", nullable=True),
        *columns(sa.String(), "manifest_digest", "state", "reason"),
        *columns(sa.Double(), "created_at", "updated_at"),
        sa.PrimaryKeyConstraint("weights_version", name="pk_weights"),
        sa.UniqueConstraint("model_id", "number", name="uq_weights_model_id_number"),
        sa.UniqueConstraint("run_id", name="uq_weights_run_id"),
    )
    partial_unique("ux_weights_active", "weights", ["model_id"], "state = 'active'")


def _targets() -> None:
    op.create_table(
        "targets",
        *columns(sa.String(), "model_id", "slot", "weights_version"),
        *columns(sa.Double(), "updated_at"),
        sa.ForeignKeyConstraint(
            ["weights_version"],
            ["weights.weights_version"],
            name="fk_targets_weights_version_weights",
        ),
        sa.PrimaryKeyConstraint("model_id", "slot", name="pk_targets"),
    )


def _run_trajectories() -> None:
    op.create_table(
        "run_trajectories",
        *columns(sa.String(), "run_id", "trajectory_id"),
        *columns(sa.Integer(), "position"),
        *columns(sa.String(), "role"),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.run_id"], name="fk_run_trajectories_run_id_runs"
        ),
        sa.ForeignKeyConstraint(
            ["trajectory_id"],
            ["trajectories.trajectory_id"],
            name="fk_run_trajectories_trajectory_id_trajectories",
        ),
        sa.PrimaryKeyConstraint("run_id", "trajectory_id", name="pk_run_trajectories"),
    )
    partial_unique("ux_train_once", "run_trajectories", ["trajectory_id"], "role = 'train'")
