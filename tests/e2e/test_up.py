"""`m1serve up` for real: a process for every role, a tiny model, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from m1serve.cli.lifeline import own_command
from m1serve.cli.ports import is_free, pick_free
from m1serve.cli.readiness import answers
from m1serve.model.tiny import tiny_model_dir
from m1serve.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROLES = {"server", "worker", "trainer", "sidecar"}
on_both = pytest.mark.parametrize("flags", [(), ("--no-ray",)], ids=["ray", "uvicorn"])


def wait_until(condition: Callable[[], bool], *, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain: {what}"
        time.sleep(0.05)


class Running:
    """A started `up` and its home."""

    def __init__(self, tmp_path: Path, *flags: str) -> None:
        self.home = tmp_path / "home"
        self.port, self.admin_port = pick_free(), pick_free()
        self.ready_file = tmp_path / "ready.json"
        self.output = tmp_path / "up.log"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("M1SERVE_")}
        command = own_command(
            "up",
            *("--home", str(self.home), "--model", str(tmp_path / "model")),
            *("--port", str(self.port), "--admin-port", str(self.admin_port)),
            *("--ready-file", str(self.ready_file), "--set", "model.max_tokens=16", *flags),
        )
        with self.output.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=log, stderr=log
            )

    def wait_until_ready(self) -> None:
        wait_until(
            lambda: self.ready_file.exists() or self.process.poll() is not None,
            timeout_s=120,
            what="ready",
        )
        assert self.process.poll() is None, self.output.read_text()

    def pids(self) -> dict[str, int]:
        return {f.stem: int(f.read_text()) for f in (self.home / "run").glob("*.pid")}

    def processes(self) -> set[int]:
        """Every process that carries this home in its environment, but for `up` itself."""
        mark = f"M1SERVE_HOME={self.home}".encode()
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.process.pid:
                try:
                    environment = (entry / "environ").read_bytes()
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                except OSError:
                    continue
                if mark in environment.split(b"\0") and state != "Z":
                    found.add(int(entry.name))
        return found


@contextmanager
def running(tmp_path: Path, *flags: str) -> Iterator[Running]:
    tiny_model_dir(tmp_path / "model")
    up = Running(tmp_path, *flags)
    try:
        up.wait_until_ready()
        yield up
    finally:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait()
        for pid in up.processes():
            os.kill(pid, signal.SIGKILL)


def ask(up: Running, session_id: str) -> str:
    url = f"http://127.0.0.1:{up.port}/v1"
    headers = {"X-M1-Session-Id": session_id, "X-M1-Mode": "train"}
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        completion = client.chat.completions.create(
            model="nano", messages=[{"role": "user", "content": "hello"}], extra_headers=headers
        )
        client.post(f"/sessions/{session_id}/end", cast_to=object)
    return str(completion.system_fingerprint)


def kept_sessions(up: Running) -> set[str]:
    store = Store.open(f"sqlite:///{up.home / 'm1serve.db'}")
    try:
        return {row.session_id for row in store.ledger.list_trajectories(limit=1000)}
    finally:
        store.close()


@on_both
def test_up_serves_keeps_and_stops_without_a_trace(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with running(tmp_path, *flags) as up:
        assert set(up.pids()) == ROLES
        assert ask(up, "one") == "nano@0"
        wait_until(lambda: kept_sessions(up) == {"one"}, timeout_s=20, what="ingested")
        status = httpx.get(f"http://127.0.0.1:{up.admin_port}/admin/status").json()
        assert status["target"] == "nano@0"
        assert ask(up, "last") == "nano@0"
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(60) == 0
        assert up.processes() == set()
        assert up.pids() == {}
        assert is_free("127.0.0.1", up.port)
        assert kept_sessions(up) == {"one", "last"}
        assert not up.ready_file.exists()
        assert set(json.loads((up.home / "run" / "restarts.json").read_text()).values()) == {0}


@on_both
def test_killed_roles_come_back_and_a_killed_supervisor_takes_them_along(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    with running(tmp_path, *flags) as up:
        before = up.pids()
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: set(up.pids()) == ROLES and not set(up.pids().values()) & set(before.values()),
            timeout_s=30,
            what="restarted",
        )
        wait_until(lambda: answers("127.0.0.1", up.port), timeout_s=90, what="serving again")
        assert ask(up, "again") == "nano@0"
        up.process.kill()
        up.process.wait()
        wait_until(lambda: not up.processes(), timeout_s=60, what="children ended")


def test_a_second_up_on_one_home_is_refused(tmp_path: Path) -> None:
    with running(tmp_path, "--no-ray") as up:
        second = subprocess.run(
            own_command("up", "--home", str(up.home), "--no-ray", "--port", str(pick_free())),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert second.returncode == 2
        assert f"in use by another `m1serve up` (pid {up.process.pid})" in second.stderr
        assert ask(up, "undisturbed") == "nano@0"
