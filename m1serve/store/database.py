"""One database behind a URL: short read and write transactions, the same on SQLite and PostgreSQL.

SQLite runs in WAL mode and every write begins IMMEDIATE, so writers queue instead of failing half-
way.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, CursorResult, Engine, create_engine, event, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DataError, DisconnectionError, IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.sql import Executable

from m1serve.errors import StoreError
from m1serve.store.tables import Base

BUSY_TIMEOUT_S = 30.0


class Database:
    def __init__(self, url: str) -> None:
        try:
            parsed = make_url(url)
        except SQLAlchemyError as error:
            raise StoreError(
                f"database URL {url!r} is not understood ({error}); "
                "use sqlite:////path/file.db or postgresql+psycopg://user@host/name"
            ) from None
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        self.dialect = parsed.get_backend_name()
        if self.dialect not in ("sqlite", "postgresql"):
            raise StoreError(
                f"database {self.dialect!r} is not supported; use SQLite or PostgreSQL"
            )
        self.shown_url = parsed.render_as_string(hide_password=True)
        if self.dialect == "sqlite":
            self.engine = _sqlite_engine(parsed.render_as_string(), parsed.database)
        else:
            self.engine = create_engine(
                parsed, pool_pre_ping=True, connect_args={"connect_timeout": 10}
            )
        event.listen(self.engine, "connect", _remember_process)
        event.listen(self.engine, "checkout", _refuse_other_process)
        self._write_engine = self.engine.execution_options(is_write=True)

    @contextmanager
    def read(self) -> Iterator[Session]:
        with self._explained(), Session(self.engine) as session:
            yield session

    @contextmanager
    def write(self, *, lock: str | None = None) -> Iterator[Session]:
        """Commits at the end, rolls back on any error. `lock` serialises holders of one name on
        PostgreSQL.
        """
        with (
            self._explained(),
            Session(self._write_engine, expire_on_commit=False) as session,
            session.begin(),
        ):
            if lock is not None and self.dialect == "postgresql":
                session.execute(
                    text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))"), {"name": lock}
                )
            yield session

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """A write transaction on a bare connection, for migrations."""
        with self._explained(), self._write_engine.begin() as connection:
            yield connection

    def insert_new(
        self, session: Session, table: type[Base], rows: Sequence[Mapping[str, object]]
    ) -> int:
        """Inserts what is not there yet; returns how many rows were new."""
        if not rows:
            return 0
        insert = sqlite.insert if self.dialect == "sqlite" else postgresql.insert
        target = Base.metadata.tables[table.__tablename__]
        # counted by what returns: psycopg tells no rowcount for this statement
        statement = insert(target).on_conflict_do_nothing().returning(*target.primary_key)
        return len(session.execute(statement, [dict(row) for row in rows]).all())

    def make_durable(self) -> bool:
        if self.dialect != "sqlite":
            return True
        # in WAL mode with synchronous=NORMAL only a checkpoint syncs what was committed, and a
        # reader that stays in the past can keep it from reaching the end
        with self._explained(), self.engine.connect() as connection:
            connection.exec_driver_sql("COMMIT")
            found = connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)").one()
        _, num_frames, num_synced = found
        return bool(num_frames == num_synced)

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (SQLAlchemyError, sqlite3.Error) as error:
            cause = getattr(error, "orig", None) or error
            raise StoreError(
                f"database {self.shown_url} failed: {type(cause).__name__}: {cause}; "
                "check database_url, that it is reachable and that its disk is not full"
            ) from error


def changed(session: Session, statement: Executable) -> int:
    """Executes an UPDATE, INSERT or DELETE and returns how many rows it touched."""
    result = session.execute(statement, execution_options={"synchronize_session": False})
    assert isinstance(result, CursorResult)
    return int(result.rowcount)


def is_conflict(error: StoreError) -> bool:
    """Two transactions got into each other's way; the same work may succeed when repeated."""
    cause = error.__cause__
    state = getattr(getattr(cause, "orig", None), "sqlstate", None)
    return isinstance(cause, IntegrityError) or state in ("40001", "40P01")


def is_refusal(error: StoreError) -> bool:
    """The database answers, but these values it will never take."""
    return isinstance(error.__cause__, (IntegrityError, DataError, type(None)))


def clean_text(value: str) -> str:
    """PostgreSQL stores no NUL, and nobody stores half of a surrogate pair."""
    return value.replace("\0", "\ufffd").encode(errors="replace").decode()


def chunks(values: Sequence[str], size: int = 500) -> Iterator[Sequence[str]]:
    """Parts small enough for one IN list."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


def _sqlite_engine(url: str, path: str | None) -> Engine:
    if path and path != ":memory:":
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"no directory for the database {path}: {error}") from error
    engine = create_engine(
        url, connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False}
    )
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: sqlite3.Connection, record: object) -> None:
    connection.isolation_level = None
    connection.execute(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT_S * 1000)}")
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA synchronous=NORMAL")
    _switch_to_wal(connection)


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    # the switch itself ignores busy_timeout when several processes open a new file at once
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _begin_sqlite(connection: Connection) -> None:
    is_write = connection.get_execution_options().get("is_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")


def _remember_process(connection: object, record: object) -> None:
    record.info["pid"] = os.getpid()  # type: ignore[attr-defined]


def _refuse_other_process(connection: object, record: object, proxy: object) -> None:
    # a forked child must not speak on its parent's sockets; the pool opens a new one instead
    if record.info["pid"] != os.getpid():  # type: ignore[attr-defined]
        record.dbapi_connection = proxy.dbapi_connection = None  # type: ignore[attr-defined]
        raise DisconnectionError("connection belongs to the parent process")
