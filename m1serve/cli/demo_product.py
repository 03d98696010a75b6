"""A product under demonstration: `m1serve up` in a fresh home, as a process of its own."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

from m1serve.cli import options
from m1serve.cli.home_lock import lock_home
from m1serve.cli.lifeline import own_command, tied_environment
from m1serve.config import Settings
from m1serve.errors import ConfigError

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 90.0
MARKS = ("run/up.lock", "logs/up.log")
"""One of them is in every home that a demo has used."""


def fresh_home(home: Path) -> None:
    """An empty `home`. Refused while something runs in it, or when it is not a home of ours."""
    if home.exists() and any(home.iterdir()):
        if not any((home / mark).exists() for mark in MARKS):
            raise ConfigError(
                f"{home} was not made by `m1serve demo` and would be deleted; choose another --out"
            )
        with lock_home(home):
            shutil.rmtree(home)
    home.mkdir(parents=True, exist_ok=True)


class Product:
    def __init__(self, settings: Settings, *, is_kept: bool) -> None:
        """Starts it. `is_kept` lets it outlive this process."""
        self.settings = settings
        self.url = f"http://{settings.serve.host}:{settings.serve.port}/v1"
        self._ready_file = settings.home / "ready.json"
        self._log = settings.log_dir / "up.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        environment = options.settings_environment(settings)
        if not is_kept:
            environment = tied_environment(environment, num_threads=1)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                own_command("up", "--ready-file", str(self._ready_file)),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Raises ConfigError with the reason when it does not come up."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._ready_file.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                lines = self._log.read_text(errors="replace").strip().splitlines() or ["no output"]
                raise ConfigError(f"the product did not start: {lines[-1]}; see {self._log}")
            time.sleep(0.1)

    def num_restarts(self) -> int:
        counts = json.loads((self.settings.home / "run" / "restarts.json").read_text())
        return sum(counts.values())

    def stop(self) -> int:
        """SIGTERM, then waits; returns the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
