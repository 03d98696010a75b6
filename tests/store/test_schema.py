from __future__ import annotations

import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.script import ScriptDirectory

from m1serve.errors import StoreError
from m1serve.store import Store, work_tables
from m1serve.store.database import Database
from m1serve.store.schema import alembic_config, current_revision, upgrade
from m1serve.store.tables import SCHEMA_REVISION, Base

DESIGNED = {
    "turns": "tenant_id key_id model_id mode consent retention_until erased_at session_id "
    "group_key task_id request_hash history_rule token_flags sampling version_spans "
    "tokenizer_digest template_digest numerics_digest",
    "rewards": "scorer scorer_version status components evidence supersedes",
    "jobs": "state lease_until token attempts sent_at",
    "run_trajectories": "run_id trajectory_id role",
    "deployments": "replica slot weights_version verified_at report",
    "targets": "model_id slot weights_version",
    "prompt_blocks": "block_id tenant_id ids",
}


@pytest.fixture
def empty_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'new.db'}"


def tables(db: Database) -> set[str]:
    with db.engine.connect() as connection:
        return set(sa.inspect(connection).get_table_names())


def test_migrations_go_up_and_down(empty_url: str) -> None:
    db = Database(empty_url)
    with db.connection() as connection:
        upgrade(connection)
    assert tables(db) == {*Base.metadata.tables, "alembic_version"}
    with db.connection() as connection:
        command.downgrade(alembic_config(connection), "base")
    assert tables(db) == {"alembic_version"}
    with db.connection() as connection:
        upgrade(connection)
        assert current_revision(connection) == SCHEMA_REVISION
    db.close()


def test_the_migrations_make_what_the_tables_say(database_url: str) -> None:
    db = Database(database_url)
    with db.connection() as connection:
        # raises when autogenerate would add anything
        command.check(alembic_config(connection))
        heads = ScriptDirectory.from_config(alembic_config(connection)).get_heads()
    assert heads == [SCHEMA_REVISION]
    db.close()


@pytest.mark.parametrize("table", sorted(DESIGNED))
def test_the_first_migration_has_the_designed_columns(database_url: str, table: str) -> None:
    assert work_tables.JobRow.metadata is Base.metadata
    db = Database(database_url)
    with db.engine.connect() as connection:
        columns = {str(c["name"]) for c in sa.inspect(connection).get_columns(table)}
    db.close()
    assert set(DESIGNED[table].split()) <= columns


def test_a_newer_schema_is_refused(database_url: str) -> None:
    db = Database(database_url)
    set_revision(db, "9999")
    with pytest.raises(StoreError, match="schema 9999, newer than this code's 0002"):
        Store.open(database_url)
    set_revision(db, SCHEMA_REVISION)
    db.close()


def test_without_leave_to_migrate_an_old_schema_is_refused(empty_url: str) -> None:
    with pytest.raises(StoreError, match=r"(?s)schema None, this code needs 0002.*weights init"):
        Store.open(empty_url, migrate=False)


def test_a_database_that_is_up_to_date_needs_no_leave(database_url: str) -> None:
    Store.open(database_url, migrate=False).close()


def test_many_may_open_a_new_database_at_once(empty_url: str) -> None:
    failed: list[BaseException] = []

    def open_it() -> None:
        try:
            Store.open(empty_url).close()
        except StoreError as error:
            failed.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreError, match="not a database"):
        Store.open(f"sqlite:///{tmp_path / 'x.db'}")


def set_revision(db: Database, revision: str) -> None:
    with db.connection() as connection:
        connection.execute(
            sa.text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision}
        )


def test_a_ledger_of_the_first_schema_is_read_after_its_upgrade(empty_url: str) -> None:
    db = Database(empty_url)
    with db.connection() as connection:
        command.upgrade(alembic_config(connection), "0001")
        rows = {
            "sessions": {"session_key": "k", "session_id": "s", "tenant_id": "t"},
            "turns": {"turn_id": "turn", "session_key": "k", "request_id": "r"},
            "feedback": {"feedback_id": "f", "tenant_id": "t", "value": 1.0},
        }
        for table, values in rows.items():
            insert_old(connection, table, values)
    db.close()
    store = Store.open(empty_url)
    with store._db.read() as session:
        found = session.execute(
            sa.text("SELECT session_source, is_ambiguous, source FROM turns, sessions, feedback")
        ).one()
    assert tuple(found) == ("unknown", 0, "client")
    with store._db.connection() as connection:
        command.downgrade(alembic_config(connection), "0001")
        assert connection.execute(sa.text("SELECT count(*) FROM turns")).scalar() == 1
    store.close()


def insert_old(connection: sa.Connection, table: str, values: dict[str, object]) -> None:
    """A row with something in every column that wants it."""
    filled = dict(values)
    for column in sa.inspect(connection).get_columns(table):
        if not column["nullable"] and column["name"] not in filled:
            is_json = isinstance(column["type"], sa.JSON)
            filled[str(column["name"])] = "{}" if is_json else column["type"].python_type()
    names = ", ".join(f'"{name}"' for name in filled)
    marks = ", ".join(f":{name}" for name in filled)
    connection.execute(sa.text(f"INSERT INTO {table} ({names}) VALUES ({marks})"), filled)
