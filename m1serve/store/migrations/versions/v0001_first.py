"""The ledger, jobs, runs, weights and all that is kept about them."""

from __future__ import annotations

from m1serve.store.migrations import first_ledger, first_work

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    first_ledger.create()
    first_work.create()


def downgrade() -> None:
    first_work.drop()
    first_ledger.drop()
