"""The ledger part of revision 0001. Frozen: later changes are later revisions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from m1serve.store.migrations.ddl import columns, partial_unique


def create() -> None:
    _feedback()
    _journal_cursors()
    _prompt_blocks()
    _sessions()
    _trajectories()
    _turns()
    _rewards()
    _trajectory_turns()


def drop() -> None:
    op.drop_table("trajectory_turns")
    op.drop_table("rewards")
    op.drop_table("turns")
    op.drop_table("trajectories")
    op.drop_table("sessions")
    op.drop_table("prompt_blocks")
    op.drop_table("journal_cursors")
    op.drop_table("feedback")


def _feedback() -> None:
    op.create_table(
        "feedback",
        *columns(sa.String(), "feedback_id", "tenant_id", "key_id"),
        *columns(sa.Double(), "at"),
        *columns(sa.String(), "session_id", "turn_id", nullable=True),
        *columns(sa.String(), "metric"),
        *columns(sa.Double(), "value"),
        *columns(sa.String(), "comment"),
        sa.PrimaryKeyConstraint("feedback_id", name="pk_feedback"),
    )
    op.create_index("ix_feedback_tenant_id_session_id", "feedback", ["tenant_id", "session_id"])


def _journal_cursors() -> None:
    op.create_table(
        "journal_cursors",
        *columns(sa.String(), "writer"),
        *columns(sa.Integer(), "segment"),
        *columns(sa.BigInteger(), "offset", "last_seq"),
        *columns(sa.Double(), "updated_at"),
        sa.PrimaryKeyConstraint("writer", name="pk_journal_cursors"),
    )


def _prompt_blocks() -> None:
    op.create_table(
        "prompt_blocks",
        *columns(sa.LargeBinary(), "block_id"),
        *columns(sa.String(), "tenant_id"),
        *columns(sa.LargeBinary(), "ids"),
        *columns(sa.Integer(), "num_tokens"),
        *columns(sa.Double(), "created_at"),
        sa.PrimaryKeyConstraint("block_id", name="pk_prompt_blocks"),
    )
    op.create_index("ix_prompt_blocks_tenant_id", "prompt_blocks", ["tenant_id"])


def _sessions() -> None:
    op.create_table(
        "sessions",
        *columns(sa.String(), "session_key", "tenant_id", "session_id"),
        *columns(sa.String(), "group_key", "task_id", nullable=True),
        *columns(sa.String(), "model_id", "mode"),
        *columns(sa.Double(), "opened_at", "last_seen_at"),
        *columns(sa.Double(), "closed_at", nullable=True),
        *columns(sa.String(), "close_reason", nullable=True),
        *columns(sa.Integer(), "num_turns"),
        *columns(sa.Boolean(), "is_incomplete"),
        *columns(sa.Double(), "retention_until", "erased_at", nullable=True),
        sa.PrimaryKeyConstraint("session_key", name="pk_sessions"),
        sa.UniqueConstraint("tenant_id", "session_id", name="uq_sessions_tenant_id_session_id"),
    )
    op.create_index("ix_sessions_closed_at_last_seen_at", "sessions", ["closed_at", "last_seen_at"])
    op.create_index("ix_sessions_tenant_id_group_key", "sessions", ["tenant_id", "group_key"])


def _trajectories() -> None:
    op.create_table(
        "trajectories",
        *columns(sa.String(), "trajectory_id", "session_key"),
        *columns(sa.Integer(), "segment"),
        *columns(sa.String(), "session_id", "tenant_id", "key_id"),
        *columns(sa.String(), "group_key", "task_id", nullable=True),
        *columns(sa.String(), "model_id", "mode"),
        *columns(sa.Boolean(), "consent"),
        *columns(sa.String(), "history_rule"),
        *columns(sa.Integer(), "num_turns", "num_prompt", "num_completion", "num_trainable"),
        *columns(sa.Integer(), "min_version", "max_version", nullable=True),
        *columns(sa.Boolean(), "is_trainable"),
        *columns(sa.String(), "state", "state_reason"),
        *columns(sa.Double(), "reward", nullable=True),
        *columns(sa.String(), "reward_status", "claim_run_id", nullable=True),
        *columns(sa.Double(), "created_at", "updated_at"),
        *columns(sa.Double(), "retention_until", "erased_at", nullable=True),
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
        *columns(sa.String(), "turn_id", "writer"),
        *columns(sa.BigInteger(), "seq"),
        *columns(sa.String(), "request_id", "session_key", "session_id"),
        *columns(sa.String(), "group_key", "task_id", nullable=True),
        *columns(sa.String(), "tenant_id", "key_id", "model_id", "mode"),
        *columns(sa.Boolean(), "consent"),
        *columns(sa.Double(), "created_at", "ingested_at"),
        *columns(sa.Double(), "retention_until", "erased_at", nullable=True),
        *columns(sa.Integer(), "choice", "num_choices"),
        *columns(sa.String(), "history_rule", "request_hash"),
        *columns(sa.Integer(), "retry_count"),
        *columns(sa.String(), "parent_turn_id", nullable=True),
        *columns(sa.String(), "drift"),
        *columns(sa.Integer(), "shared_tokens"),
        *columns(sa.String(), "superseded_by", nullable=True),
        *columns(sa.Integer(), "num_prompt", "num_completion", "num_trainable"),
        *columns(
            sa.LargeBinary(),
            "prompt_digest",
            "full_digest",
            "prompt_blocks",
            "prompt_tail",
            "completion",
            "logprobs",
        ),
        *columns(sa.LargeBinary(), "sampled_logprobs", nullable=True),
        *columns(sa.LargeBinary(), "token_flags"),
        *columns(sa.JSON(), "version_spans"),
        *columns(sa.Integer(), "min_version", "max_version", nullable=True),
        *columns(sa.JSON(), "sampling"),
        *columns(sa.String(), "stop"),
        *columns(sa.String(), "stop_detail", nullable=True),
        *columns(sa.String(), "finish_reason"),
        *columns(sa.Boolean(), "was_delivered"),
        *columns(sa.Integer(), "cached_tokens"),
        *columns(sa.String(), "tokenizer_digest", "template_digest", "numerics_digest"),
        *columns(sa.Double(), "ttft_ms", "total_ms"),
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
        *columns(sa.Integer(), "reward_id"),
        *columns(sa.String(), "trajectory_id", "scorer", "scorer_version"),
        *columns(sa.Double(), "value", nullable=True),
        *columns(sa.String(), "status"),
        *columns(sa.JSON(), "components"),
        *columns(sa.String(), "evidence"),
        *columns(sa.String(), "job_id", nullable=True),
        *columns(sa.Integer(), "supersedes", nullable=True),
        *columns(sa.Boolean(), "is_current"),
        *columns(sa.Double(), "created_at"),
        sa.ForeignKeyConstraint(
            ["trajectory_id"],
            ["trajectories.trajectory_id"],
            name="fk_rewards_trajectory_id_trajectories",
        ),
        sa.PrimaryKeyConstraint("reward_id", name="pk_rewards"),
    )
    op.create_index("ix_rewards_trajectory_id", "rewards", ["trajectory_id"])
    partial_unique("ux_rewards_current", "rewards", ["trajectory_id", "scorer"], "is_current")


def _trajectory_turns() -> None:
    op.create_table(
        "trajectory_turns",
        *columns(sa.String(), "trajectory_id"),
        *columns(sa.Integer(), "position"),
        *columns(sa.String(), "turn_id"),
        *columns(sa.Boolean(), "is_context"),
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
