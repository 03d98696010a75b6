"""Brings a database to this code's schema with Alembic, from code; several processes may do it at
once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

from m1serve.errors import StoreError
from m1serve.store.database import Database
from m1serve.store.tables import SCHEMA_REVISION

if TYPE_CHECKING:
    from alembic.config import Config


def current_revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return None if revision is None else str(revision)


def ensure_schema(db: Database, *, migrate: bool) -> None:
    """Upgrades when behind and allowed to; raises StoreError when the two do not fit."""
    with db.read() as session:
        revision = current_revision(session.connection())
    if revision == SCHEMA_REVISION:
        return
    if not migrate:
        raise StoreError(
            f"database {db.shown_url} has schema {revision}, this code needs {SCHEMA_REVISION}; "
            "`m1serve weights init` brings it up to date"
        )
    with db.connection() as connection:
        if db.dialect == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(7231)"))
        upgrade(connection, db.shown_url)


def upgrade(connection: Connection, shown_url: str = "") -> None:
    from alembic import command
    from alembic.script import ScriptDirectory

    config = alembic_config(connection)
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    revision = current_revision(connection)
    if revision is not None and revision not in known:
        raise StoreError(
            f"database {shown_url} has schema {revision}, newer than this code's "
            f"{SCHEMA_REVISION}; install the m1serve that wrote it"
        )
    command.upgrade(config, "head")


def alembic_config(connection: Connection) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    return config
