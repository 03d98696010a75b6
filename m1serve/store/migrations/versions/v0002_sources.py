"""How turns came to their sessions, ambiguous sessions, feedback on completions and its source."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


# plain ALTERs: batch mode copies a table and drops it, which rows that refer to it forbid


def upgrade() -> None:
    no = sa.false()
    op.add_column(
        "sessions", sa.Column("is_ambiguous", sa.Boolean(), nullable=False, server_default=no)
    )
    op.add_column(
        "turns", sa.Column("session_source", sa.String(), nullable=False, server_default="unknown")
    )
    op.create_index("ix_turns_request_id", "turns", ["request_id"])
    op.add_column("feedback", sa.Column("request_id", sa.String(), nullable=True))
    op.add_column(
        "feedback", sa.Column("source", sa.String(), nullable=False, server_default="client")
    )
    op.create_index("ix_feedback_tenant_id_request_id", "feedback", ["tenant_id", "request_id"])


def downgrade() -> None:
    op.drop_index("ix_feedback_tenant_id_request_id", "feedback")
    op.drop_column("feedback", "source")
    op.drop_column("feedback", "request_id")
    op.drop_index("ix_turns_request_id", "turns")
    op.drop_column("turns", "session_source")
    op.drop_column("sessions", "is_ambiguous")
