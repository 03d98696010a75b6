"""A server of one's own to measure or torment: `m1serve serve` in a fresh home, as a process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

READY_S = 180.0
STOP_S = 60.0
SETTLE_POLL_S = 0.1
_LOAD_METRICS = {
    "m1serve_engine_running_sequences": "slots_in_use",
    "m1serve_engine_waiting_requests": "waiting",
    "m1serve_open_responses": "open_responses",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """What an idle server has none of."""

    slots_in_use: int
    waiting: int
    open_responses: int

    @property
    def is_idle(self) -> bool:
        return self.slots_in_use == self.waiting == self.open_responses == 0


class LocalServer:
    """A running server, seen from outside. `stop` it, or use `local_server`."""

    def __init__(self, home: Path, *, flags: Sequence[str]) -> None:
        self.port, admin_port = _free_port(), _free_port()
        self.log_file = home / "server.log"
        command = [sys.executable, "-P", "-m", "m1serve.cli"]
        where = ["--home", str(home / "home")]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("M1SERVE_")}
        environment["OMP_NUM_THREADS"] = "1"
        with self.log_file.open("ab") as log:
            init = [*command, "weights", "init", *where]
            subprocess.run(init, env=environment, stdout=log, stderr=log, check=True)
            ports = ["--port", str(self.port), "--admin-port", str(admin_port)]
            self.process = subprocess.Popen(
                [*command, "serve", *where, *ports, *flags],
                env=environment,
                stdout=log,
                stderr=log,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_alive(self) -> bool:
        """The process runs and its engine answers."""
        return self.process.poll() is None and self._is_healthy()

    def wait_until_ready(self) -> None:
        """Raises RuntimeError with the server's log when it does not come up."""
        deadline = time.monotonic() + READY_S
        while not self._is_healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server is not ready: {self.log_file.read_text()}")
            time.sleep(0.1)

    def load(self) -> ServerLoad:
        """As of now: asking for the health refreshes what a server under Ray knows of its engine.

        Raises httpx.HTTPError when the server does not answer.
        """
        httpx.get(f"{self.url}/health", timeout=30, verify=False).raise_for_status()
        text = httpx.get(f"{self.url}/metrics", timeout=30, verify=False).raise_for_status().text
        found = {"slots_in_use": 0, "waiting": 0, "open_responses": 0}
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if name in _LOAD_METRICS:
                found[_LOAD_METRICS[name]] = round(float(value))
        return ServerLoad(**found)

    def load_when_settled(self, within_s: float) -> ServerLoad:
        """The load once it is none; what is left of it when the time is over."""
        deadline = time.monotonic() + within_s
        while not (load := self.load()).is_idle and time.monotonic() < deadline:
            time.sleep(SETTLE_POLL_S)
        return load

    def stop(self) -> int:
        """Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5, verify=False).status_code == 200
        except httpx.HTTPError:
            return False


@contextmanager
def local_server(
    *settings: str, script: str | None = None, with_ray: bool = False
) -> Iterator[LocalServer]:
    """Serves the shipped nano, or what `script` says (JSON lines for the scripted engine).

    `settings` are of the form section.key=value. Nothing of it outlives the block.
    """
    with tempfile.TemporaryDirectory(prefix="m1serve-") as directory:
        flags = [part for setting in settings for part in ("--set", setting)]
        if not with_ray:
            flags.append("--no-ray")
        if script is not None:
            file = Path(directory) / "script.jsonl"
            file.write_text(script)
            flags += ["--set", "engine.kind=scripted", "--set", f"engine.script={file}"]
        server = LocalServer(Path(directory), flags=flags)
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
