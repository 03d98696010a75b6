"""A real `m1serve up` in processes of its own, looked at from outside."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from m1serve.cli.lifeline import own_command
from m1serve.cli.ports import pick_free
from m1serve.cli.readiness import answers
from m1serve.model.tiny import tiny_model_dir

SETTINGS = (
    "model.max_tokens=10",
    "engine.num_slots=16",
    "serve.session_idle_s=4",
    "score.timeout_s=5",
    "train.lease_s=2",
    "train.minibatches=2",
    "train.num_threads=1",
    "train.max_groups=8",
    "gate.tasks_per_family=1",
    'gate.families=["sums","lookup"]',
    # two random texts of four are no rate
    "gate.min_format_rate=0",
)


@dataclass(frozen=True)
class Process:
    """As the kernel knows it: a reused pid is another process."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """None when it is gone, or dead and only not waited for yet."""
        stat = _stat(pid)
        return None if stat is None or stat[0] == "Z" else cls(pid, stat[19])

    @property
    def is_alive(self) -> bool:
        return Process.of(self.pid) == self


class Product:
    """A running `m1serve up` with the tiny model."""

    def __init__(self, root: Path, *flags: str) -> None:
        self.home = root / "home"
        self.port, self.admin_port = pick_free(), pick_free()
        self.log, ready_file = root / "up.log", root / "ready.json"
        settings = [part for setting in SETTINGS for part in ("--set", setting)]
        command = own_command(
            "up",
            *("--home", str(self.home), "--model", str(root / "model")),
            *("--port", str(self.port), "--admin-port", str(self.admin_port)),
            *("--ready-file", str(ready_file), *settings, *flags),
        )
        environment = {k: v for k, v in os.environ.items() if not k.startswith("M1SERVE_")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=root, env=environment, stdout=log, stderr=log
            )
        self.wait_until(
            lambda: ready_file.exists() or self.process.poll() is not None, 120, "ready"
        )
        assert self.process.poll() is None, self.log.read_text()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}/admin"

    def role(self, name: str) -> Process | None:
        """The running process of a role, from its pid file."""
        try:
            return Process.of(int((self.home / "run" / f"{name}.pid").read_text()))
        except (FileNotFoundError, ValueError):
            return None

    def is_serving(self) -> bool:
        return answers("127.0.0.1", self.port)

    def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """From the product's own database, looked into from outside."""
        uri = f"file:{self.home / 'm1serve.db'}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=30)) as connection:
            return connection.execute(sql, values).fetchall()

    def one(self, sql: str, *values: object) -> Any:
        return self.rows(sql, *values)[0][0]

    def retrain(self) -> str:
        answer = httpx.post(f"{self.admin_url}/retrain", json={"trigger": "test"}, timeout=5)
        return str(answer.raise_for_status().json()["run_id"])

    def wait_until(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s} s in vain: {what}"
            time.sleep(0.02)

    def descendants(self) -> set[Process]:
        """All below `up`, and all that carry its home: Ray's processes, and the scorers'."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            stat = _stat(int(entry.name)) if entry.name.isdigit() else None
            if stat is not None:
                parents[int(entry.name)] = int(stat[1])
        ours = [pid for pid in parents if self._is_ancestor_of(pid, parents) or self._is_home(pid)]
        return {process for pid in ours if (process := Process.of(pid)) is not None}

    def named(self, name: str) -> list[Process]:
        """Of the descendants, those whose command line contains it."""
        found = []
        for process in self.descendants():
            try:
                command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            except OSError:
                continue
            if name.encode() in command:
                found.append(process)
        return found

    def _is_ancestor_of(self, pid: int, parents: dict[int, int]) -> bool:
        while pid := parents.get(pid, 0):
            if pid == self.process.pid:
                return True
        return False

    def _is_home(self, pid: int) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return f"M1SERVE_HOME={self.home}".encode() in environment


def _stat(pid: int) -> list[str] | None:
    """/proc/<pid>/stat from the state on: state, parent, ...; field 19 is the start time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


@pytest.fixture(scope="session")
def start_up(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A context manager that yields a Product; nothing of it outlives the block."""

    @contextmanager
    def start(*flags: str) -> Iterator[Product]:
        root = tmp_path_factory.mktemp("up")
        tiny_model_dir(root / "model")
        product = Product(root, *flags)
        seen = product.descendants()
        try:
            yield product
        finally:
            seen |= product.descendants()
            if product.process.poll() is None:
                product.process.kill()
                product.process.wait()
            for process in seen | product.descendants():
                if process.is_alive:
                    os.kill(process.pid, signal.SIGKILL)

    return start
