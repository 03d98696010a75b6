"""How turns came to their sessions, ambiguous sessions, feedback on completions and its source."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("sessions") as table:
        table.add_column(
            sa.Column("is_ambiguous", sa.Boolean(), nullable=False, server_default=sa.false())
        )
    with op.batch_alter_table("turns") as table:
        table.add_column(
            sa.Column("session_source", sa.String(), nullable=False, server_default="unknown")
        )
        table.create_index("ix_turns_request_id", ["request_id"])
    with op.batch_alter_table("feedback") as table:
        table.add_column(sa.Column("request_id", sa.String(), nullable=True))
        table.add_column(sa.Column("source", sa.String(), nullable=False, server_default="client"))
        table.create_index("ix_feedback_tenant_id_request_id", ["tenant_id", "request_id"])


def downgrade() -> None:
    with op.batch_alter_table("feedback") as table:
        table.drop_index("ix_feedback_tenant_id_request_id")
        table.drop_column("source")
        table.drop_column("request_id")
    with op.batch_alter_table("turns") as table:
        table.drop_index("ix_turns_request_id")
        table.drop_column("session_source")
    with op.batch_alter_table("sessions") as table:
        table.drop_column("is_ambiguous")
