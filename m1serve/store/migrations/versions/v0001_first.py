"""Migration 1: the ledger, jobs, runs, weights and all that is kept about them."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _audit()
    _deployments()
    _evals()
    _feedback()
    _jobs()
    _journal_cursors()
    _prompt_blocks()
    _runs()
    _sessions()
    _weights()
    _targets()
    _trajectories()
    _turns()
    _rewards()
    _run_trajectories()
    _trajectory_turns()


def downgrade() -> None:
    op.drop_table("trajectory_turns")
    op.drop_table("run_trajectories")
    op.drop_table("rewards")
    op.drop_table("turns")
    op.drop_table("trajectories")
    op.drop_table("targets")
    op.drop_table("weights")
    op.drop_table("sessions")
    op.drop_table("runs")
    op.drop_table("prompt_blocks")
    op.drop_table("journal_cursors")
    op.drop_table("jobs")
    op.drop_table("feedback")
    op.drop_table("evals")
    op.drop_table("deployments")
    op.drop_table("audit")


def _audit() -> None:
    op.create_table(
        "audit",
        *_columns(sa.Integer(), "audit_id"),
        *_columns(sa.Double(), "at"),
        *_columns(sa.String(), "actor", "action", "subject"),
        *_columns(sa.String(), "before", "after", nullable=True),
        *_columns(sa.String(), "reason"),
        sa.PrimaryKeyConstraint("audit_id", name="pk_audit"),
    )
    op.create_index("ix_audit_at", "audit", ["at"])
    op.create_index("ix_audit_subject", "audit", ["subject"])


def _deployments() -> None:
    op.create_table(
        "deployments",
        *_columns(sa.String(), "replica", "slot", "model_id", "weights_version", "wanted_version"),
        *_columns(sa.Boolean(), "is_accepted"),
        *_columns(sa.String(), "reason"),
        *_columns(sa.JSON(), "report"),
        *_columns(sa.Double(), "verified_at"),
        sa.PrimaryKeyConstraint("replica", "slot", name="pk_deployments"),
    )
    op.create_index("ix_deployments_model_id", "deployments", ["model_id"])


def _evals() -> None:
    op.create_table(
        "evals",
        *_columns(sa.Integer(), "eval_id"),
        *_columns(sa.String(), "weights_version", "suite", "family"),
        *_columns(sa.Integer(), "num", "successes"),
        *_columns(sa.JSON(), "details"),
        *_columns(sa.Double(), "created_at"),
        sa.PrimaryKeyConstraint("eval_id", name="pk_evals"),
    )
    op.create_index("ix_evals_weights_version", "evals", ["weights_version"])


def _feedback() -> None:
    op.create_table(
        "feedback",
        *_columns(sa.String(64), "feedback_id"),
        *_columns(sa.String(), "tenant_id", "key_id"),
        *_columns(sa.Double(), "at"),
        *_columns(sa.String(), "session_id", "turn_id", nullable=True),
        *_columns(sa.String(), "metric"),
        *_columns(sa.Double(), "value"),
        *_columns(sa.String(), "comment"),
        sa.PrimaryKeyConstraint("feedback_id", name="pk_feedback"),
    )
    op.create_index("ix_feedback_tenant_id_session_id", "feedback", ["tenant_id", "session_id"])


def _jobs() -> None:
    op.create_table(
        "jobs",
        *_columns(sa.String(32), "job_id"),
        *_columns(sa.String(), "kind", "key"),
        *_columns(sa.JSON(), "payload"),
        *_columns(sa.String(), "state"),
        *_columns(sa.Double(), "run_after"),
        *_columns(sa.Double(), "sent_at", "lease_until", nullable=True),
        *_columns(sa.String(32), "token", nullable=True),
        *_columns(sa.Integer(), "attempts", "max_attempts"),
        *_columns(sa.String(), "error", nullable=True),
        *_columns(sa.Double(), "created_at"),
        *_columns(sa.Double(), "finished_at", nullable=True),
        sa.PrimaryKeyConstraint("job_id", name="pk_jobs"),
        sa.UniqueConstraint("key", name="uq_jobs_key"),
    )
    op.create_index("ix_jobs_state_run_after", "jobs", ["state", "run_after"])


def _journal_cursors() -> None:
    op.create_table(
        "journal_cursors",
        *_columns(sa.String(32), "writer"),
        *_columns(sa.Integer(), "segment"),
        *_columns(sa.BigInteger(), "offset", "last_seq"),
        *_columns(sa.Double(), "updated_at"),
        sa.PrimaryKeyConstraint("writer", name="pk_journal_cursors"),
    )


def _prompt_blocks() -> None:
    op.create_table(
        "prompt_blocks",
        *_columns(sa.LargeBinary(), "block_id"),
        *_columns(sa.String(), "tenant_id"),
        *_columns(sa.LargeBinary(), "ids"),
        *_columns(sa.Integer(), "num_tokens"),
        *_columns(sa.Double(), "created_at"),
        sa.PrimaryKeyConstraint("block_id", name="pk_prompt_blocks"),
    )
    op.create_index("ix_prompt_blocks_tenant_id", "prompt_blocks", ["tenant_id"])


def _runs() -> None:
    op.create_table(
        "runs",
        *_columns(sa.String(32), "run_id"),
        *_columns(sa.String(), "model_id", "trigger"),
        *_columns(sa.JSON(), "overrides"),
        *_columns(sa.String(), "state", "phase", "reason"),
        *_columns(sa.String(), "owner", nullable=True),
        *_columns(sa.String(32), "token", nullable=True),
        *_columns(sa.BigInteger(), "fence"),
        *_columns(sa.Double(), "lease_s"),
        *_columns(sa.Double(), "lease_until", nullable=True),
        *_columns(sa.String(), "parent_version", "weights_version", nullable=True),
        *_columns(sa.Double(), "claimed_at", nullable=True),
        *_columns(sa.Integer(), "num_claimed"),
        *_columns(sa.JSON(), "metrics"),
        *_columns(sa.Double(), "requested_at"),
        *_columns(sa.Double(), "started_at", "heartbeat_at", "finished_at", nullable=True),
        sa.PrimaryKeyConstraint("run_id", name="pk_runs"),
    )
    op.create_index("ix_runs_state_lease_until", "runs", ["state", "lease_until"])


def _sessions() -> None:
    op.create_table(
        "sessions",
        *_columns(sa.String(32), "session_key"),
        *_columns(sa.String(), "tenant_id", "session_id"),
        *_columns(sa.String(), "group_key", "task_id", nullable=True),
        *_columns(sa.String(), "model_id", "mode"),
        *_columns(sa.Double(), "opened_at", "last_seen_at"),
        *_columns(sa.Double(), "closed_at", nullable=True),
        *_columns(sa.String(), "close_reason", nullable=True),
        *_columns(sa.Integer(), "num_turns"),
        *_columns(sa.Boolean(), "is_incomplete"),
        *_columns(sa.Double(), "retention_until", "erased_at", nullable=True),
        sa.PrimaryKeyConstraint("session_key", name="pk_sessions"),
        sa.UniqueConstraint("tenant_id", "session_id", name="uq_sessions_tenant_id_session_id"),
    )
    op.create_index("ix_sessions_closed_at_last_seen_at", "sessions", ["closed_at", "last_seen_at"])
    op.create_index("ix_sessions_tenant_id_group_key", "sessions", ["tenant_id", "group_key"])


def _weights() -> None:
    op.create_table(
        "weights",
        *_columns(sa.String(), "weights_version", "model_id"),
        *_columns(sa.Integer(), "number"),
        *_columns(sa.String(), "path"),
        *_columns(sa.String(), "parent", "run_id", nullable=True),
        *_columns(sa.String(), "manifest_digest", "state", "reason"),
        *_columns(sa.Double(), "created_at", "updated_at"),
        sa.PrimaryKeyConstraint("weights_version", name="pk_weights"),
        sa.UniqueConstraint("run_id", name="uq_weights_run_id"),
        sa.UniqueConstraint("model_id", "number", name="uq_weights_model_id_number"),
    )
    _create_partial_unique("ux_weights_active", "weights", ["model_id"], "state = 'active'")


def _targets() -> None:
    op.create_table(
        "targets",
        *_columns(sa.String(), "model_id", "slot", "weights_version"),
        *_columns(sa.Double(), "updated_at"),
        sa.ForeignKeyConstraint(
            ["weights_version"],
            ["weights.weights_version"],
            name="fk_targets_weights_version_weights",
        ),
        sa.PrimaryKeyConstraint("model_id", "slot", name="pk_targets"),
    )


def _trajectories() -> None:
    op.create_table(
        "trajectories",
        *_columns(sa.String(32), "trajectory_id", "session_key"),
        *_columns(sa.Integer(), "segment"),
        *_columns(sa.String(), "session_id", "tenant_id", "key_id"),
        *_columns(sa.String(), "group_key", "task_id", nullable=True),
        *_columns(sa.String(), "model_id", "mode"),
        *_columns(sa.Boolean(), "consent"),
        *_columns(sa.String(), "history_rule"),
        *_columns(sa.Integer(), "num_turns", "num_prompt", "num_completion", "num_trainable"),
        *_columns(sa.Integer(), "min_version", "max_version", nullable=True),
        *_columns(sa.Boolean(), "is_trainable"),
        *_columns(sa.String(), "state", "state_reason"),
        *_columns(sa.Double(), "reward", nullable=True),
        *_columns(sa.String(), "reward_status", nullable=True),
        *_columns(sa.String(32), "claim_run_id", nullable=True),
        *_columns(sa.Double(), "created_at", "updated_at"),
        *_columns(sa.Double(), "retention_until", "erased_at", nullable=True),
        sa.ForeignKeyConstraint(
            ["session_key"], ["sessions.session_key"], name="fk_trajectories_session_key_sessions"
        ),
        sa.PrimaryKeyConstraint("trajectory_id", name="pk_trajectories"),
        sa.UniqueConstraint("session_key", "segment", name="uq_trajectories_session_key_segment"),
    )
    op.create_index("ix_trajectories_claim_run_id", "trajectories", ["claim_run_id"])
    op.create_index(
        "ix_trajectories_model_id_state_min_version",
        "trajectories",
        ["model_id", "state", "min_version"],
    )
    op.create_index(
        "ix_trajectories_tenant_id_group_key", "trajectories", ["tenant_id", "group_key"]
    )


def _turns() -> None:
    op.create_table(
        "turns",
        *_columns(sa.String(64), "turn_id"),
        *_columns(sa.String(32), "writer"),
        *_columns(sa.BigInteger(), "seq"),
        *_columns(sa.String(), "request_id"),
        *_columns(sa.String(32), "session_key"),
        *_columns(sa.String(), "session_id"),
        *_columns(sa.String(), "group_key", "task_id", nullable=True),
        *_columns(sa.String(), "tenant_id", "key_id", "model_id", "mode"),
        *_columns(sa.Boolean(), "consent"),
        *_columns(sa.Double(), "created_at", "ingested_at"),
        *_columns(sa.Double(), "retention_until", "erased_at", nullable=True),
        *_columns(sa.Integer(), "choice", "num_choices"),
        *_columns(sa.String(), "history_rule", "request_hash"),
        *_columns(sa.Integer(), "retry_count"),
        *_columns(sa.String(), "parent_turn_id", nullable=True),
        *_columns(sa.String(), "drift"),
        *_columns(sa.Integer(), "shared_tokens"),
        *_columns(sa.String(), "superseded_by", nullable=True),
        *_columns(sa.Integer(), "num_prompt", "num_completion", "num_trainable"),
        *_columns(
            sa.LargeBinary(),
            "prompt_digest",
            "full_digest",
            "prompt_blocks",
            "prompt_tail",
            "completion",
            "logprobs",
        ),
        *_columns(sa.LargeBinary(), "sampled_logprobs", nullable=True),
        *_columns(sa.LargeBinary(), "token_flags"),
        *_columns(sa.JSON(), "version_spans"),
        *_columns(sa.Integer(), "min_version", "max_version", nullable=True),
        *_columns(sa.JSON(), "sampling"),
        *_columns(sa.String(), "stop"),
        *_columns(sa.String(), "stop_detail", nullable=True),
        *_columns(sa.String(), "finish_reason"),
        *_columns(sa.Boolean(), "was_delivered"),
        *_columns(sa.Integer(), "cached_tokens"),
        *_columns(sa.String(), "tokenizer_digest", "template_digest", "numerics_digest"),
        *_columns(sa.Double(), "ttft_ms", "total_ms"),
        sa.ForeignKeyConstraint(
            ["session_key"], ["sessions.session_key"], name="fk_turns_session_key_sessions"
        ),
        sa.PrimaryKeyConstraint("turn_id", name="pk_turns"),
        sa.UniqueConstraint("writer", "seq", name="uq_turns_writer_seq"),
    )
    op.create_index("ix_turns_session_key_created_at", "turns", ["session_key", "created_at"])


def _rewards() -> None:
    op.create_table(
        "rewards",
        *_columns(sa.Integer(), "reward_id"),
        *_columns(sa.String(32), "trajectory_id"),
        *_columns(sa.String(), "scorer", "scorer_version"),
        *_columns(sa.Double(), "value", nullable=True),
        *_columns(sa.String(), "status"),
        *_columns(sa.JSON(), "components"),
        *_columns(sa.String(), "evidence"),
        *_columns(sa.String(), "job_id", nullable=True),
        *_columns(sa.Integer(), "supersedes", nullable=True),
        *_columns(sa.Boolean(), "is_current"),
        *_columns(sa.Double(), "created_at"),
        sa.ForeignKeyConstraint(
            ["trajectory_id"],
            ["trajectories.trajectory_id"],
            name="fk_rewards_trajectory_id_trajectories",
        ),
        sa.PrimaryKeyConstraint("reward_id", name="pk_rewards"),
    )
    op.create_index("ix_rewards_trajectory_id", "rewards", ["trajectory_id"])
    _create_partial_unique(
        "ux_rewards_current", "rewards", ["trajectory_id", "scorer"], "is_current"
    )


def _run_trajectories() -> None:
    op.create_table(
        "run_trajectories",
        *_columns(sa.String(32), "run_id", "trajectory_id"),
        *_columns(sa.Integer(), "position"),
        *_columns(sa.String(), "role"),
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
    _create_partial_unique("ux_train_once", "run_trajectories", ["trajectory_id"], "role = 'train'")


def _trajectory_turns() -> None:
    op.create_table(
        "trajectory_turns",
        *_columns(sa.String(32), "trajectory_id"),
        *_columns(sa.Integer(), "position"),
        *_columns(sa.String(64), "turn_id"),
        *_columns(sa.Boolean(), "is_context"),
        sa.ForeignKeyConstraint(
            ["trajectory_id"],
            ["trajectories.trajectory_id"],
            name="fk_trajectory_turns_trajectory_id_trajectories",
        ),
        sa.ForeignKeyConstraint(
            ["turn_id"], ["turns.turn_id"], name="fk_trajectory_turns_turn_id_turns"
        ),
        sa.PrimaryKeyConstraint("trajectory_id", "position", name="pk_trajectory_turns"),
    )
    op.create_index("ix_trajectory_turns_turn_id", "trajectory_turns", ["turn_id"])


def _columns(
    kind: sa.types.TypeEngine[Any], *names: str, nullable: bool = False
) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=nullable) for name in names]


def _create_partial_unique(name: str, table: str, columns: list[str], where: str) -> None:
    condition = sa.text(where)
    op.create_index(
        name, table, columns, unique=True, sqlite_where=condition, postgresql_where=condition
    )
