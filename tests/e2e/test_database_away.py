"""The database goes away under a running product and comes back."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import openai
import pytest
import sqlalchemy as sa

from m1serve.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.timeout(240)]

POSTGRES_URL = os.environ.get("TEST_POSTGRES_URL")
ROLES = ("server", "sidecar", "worker", "trainer")


class Wire:
    """A TCP connection point that leads to the database until it is cut."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._is_whole = True
        self._is_over = False
        self._thread = threading.Thread(target=self._forward)
        self._thread.start()

    def cut(self) -> None:
        self._is_whole = False

    def mend(self) -> None:
        self._is_whole = True

    def close(self) -> None:
        self._is_over = True
        self._thread.join()
        self._listener.close()

    def _forward(self) -> None:
        peers: dict[socket.socket, socket.socket] = {}
        while not self._is_over:
            readable, _, _ = select.select([self._listener, *peers], [], [], 0.05)
            for end in readable:
                if end is self._listener:
                    near, _ = end.accept()
                    far = socket.create_connection(self._to)
                    peers |= {near: far, far: near}
                elif end in peers and not self._pass_on(end, peers[end]):
                    _hang_up(end, peers)
            if not self._is_whole:
                for end in list(peers):
                    _hang_up(end, peers)
        for end in list(peers):
            _hang_up(end, peers)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> bool:
        with suppress(OSError):
            data = source.recv(65536)
            target.sendall(data)
            return bool(data)
        return False


def _hang_up(end: socket.socket, peers: dict[socket.socket, socket.socket]) -> None:
    if end in peers:
        other = peers.pop(end)
        del peers[other]
        end.close()
        other.close()


@pytest.fixture
def database() -> Iterator[sa.URL]:
    if POSTGRES_URL is None:
        pytest.skip("TEST_POSTGRES_URL names no PostgreSQL server")
    url = sa.make_url(POSTGRES_URL).set(database=f"test_{uuid.uuid4().hex[:12]}")
    server = sa.create_engine(POSTGRES_URL, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {url.database}"))
    yield url
    with server.connect() as connection:
        connection.execute(sa.text(f"DROP DATABASE {url.database} WITH (FORCE)"))
    server.dispose()


@pytest.fixture
def wire(database: sa.URL) -> Iterator[Wire]:
    with closing(Wire(database.host or "127.0.0.1", database.port or 5432)) as opened:
        yield opened


def ask(url: str, session_id: str) -> str:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        completion = client.chat.completions.create(
            model="nano",
            messages=[{"role": "user", "content": "hello"}],
            extra_headers={"X-M1-Session-Id": session_id, "X-M1-Task-Id": "lookup/train/1"},
        )
        client.post(f"/sessions/{session_id}/end", body={}, cast_to=object)
    return str(completion.system_fingerprint)


def test_a_product_outlives_its_database(start_up: Any, database: sa.URL, wire: Wire) -> None:
    through = database.set(host="127.0.0.1", port=wire.port).render_as_string(hide_password=False)
    direct = Store.open(database.render_as_string(hide_password=False))
    with (
        closing(direct) as store,
        start_up("--no-ray", "--set", f"database_url={through}") as product,
    ):
        assert ask(product.url, "before") == "nano@0"
        product.wait_until(lambda: store.jobs.counts() == {"done": 1}, 60, "scored")
        roles = {name: product.role(name) for name in ROLES}
        wire.cut()
        for number in range(20):
            assert ask(product.url, f"away-{number}") == "nano@0"
        assert store.ledger.count_turns() == 1
        wire.mend()
        product.wait_until(lambda: store.jobs.counts() == {"done": 21}, 60, "all scored")
        run_id = product.retrain()
        product.wait_until(lambda: store.runs.get(run_id).finished_at, 60, "run")  # type: ignore[union-attr]
        assert {name: product.role(name) for name in ROLES} == roles
        product.process.send_signal(signal.SIGTERM)
        assert product.process.wait(60) == 0
