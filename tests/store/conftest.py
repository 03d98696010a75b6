"""Stores on SQLite, and on PostgreSQL too where TEST_POSTGRES_URL names a server to play with."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from m1serve.store import Store

POSTGRES_URL = os.environ.get("TEST_POSTGRES_URL")
BACKENDS = ["sqlite", pytest.param("postgresql", marks=pytest.mark.services)]


@pytest.fixture(params=BACKENDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'store.db'}"
        return
    if POSTGRES_URL is None:
        pytest.skip("TEST_POSTGRES_URL names no PostgreSQL server")
    name = f"test_{uuid.uuid4().hex[:12]}"
    server = sa.create_engine(POSTGRES_URL, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    try:
        url = sa.engine.make_url(POSTGRES_URL).set(database=name)
        yield url.render_as_string(hide_password=False)
    finally:
        with server.connect() as connection:
            connection.execute(sa.text(f"DROP DATABASE {name} WITH (FORCE)"))
        server.dispose()


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    opened = Store.open(database_url)
    yield opened
    opened.close()
