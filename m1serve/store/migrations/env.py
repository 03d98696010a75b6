"""Alembic's entry: runs on the connection that m1serve.store.schema hands over, never on a URL of
its own.
"""

from __future__ import annotations

from alembic import context

from m1serve.store import work_tables  # noqa: F401 - its tables belong to the metadata
from m1serve.store.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    transactional_ddl=True,
    render_as_batch=True,
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
