"""Runs child processes, restarts those that crash, stops them all in order.

Each child leads a session of its own, so that what it leaves behind can be ended with it. Not a
general init: no dependencies between children beyond the order of stopping.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from m1serve.cli.lifeline import kill_session
from m1serve.errors import ConfigError

EXIT_REFUSED = 2
MAX_STARTS_BEFORE_READY = 5
LOG_ROTATE_BYTES = 16 * 2**20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    stop_order: int
    """Children with the lowest number are stopped first, equal numbers together."""
    grace_s: float = 15.0
    """Between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    first_s: float = 0.5
    max_s: float = 15.0
    calm_s: float = 30.0
    """A child that lived this long starts again at `first_s`."""

    def delay_s(self, num_crashes: int) -> float:
        return float(min(self.max_s, self.first_s * 2 ** max(0, num_crashes - 1)))


class Child:
    """One process and its history."""

    def __init__(self, spec: ChildSpec, *, run_dir: Path, log_dir: Path) -> None:
        self.spec = spec
        self.num_restarts = 0
        self.log_file = log_dir / f"{spec.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._pid_file = run_dir / f"{spec.name}.pid"

    def start(self) -> None:
        if self.log_file.exists() and self.log_file.stat().st_size > LOG_ROTATE_BYTES:
            self.log_file.replace(self.log_file.with_suffix(".log.1"))
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self.spec.argv,
                env=self.spec.environment,
                cwd=self._pid_file.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._pid_file.write_text(f"{self._process.pid}\n")

    async def wait(self) -> int:
        """Exit code of the running process; what it left in its session is killed."""
        assert self._process is not None
        await _exit_of(self._process)
        return self._bury(self._process)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL after the grace. Does nothing when it does not run."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(_exit_of(process), self.spec.grace_s)
            except TimeoutError:
                logger.warning(
                    "%s ignored SIGTERM for %.0f s: killed", self.spec.name, self.spec.grace_s
                )
        self._bury(process)

    def last_log_line(self) -> str:
        if not self.log_file.exists():
            return "(no log)"
        lines = self.log_file.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "(empty log)"

    def _bury(self, process: subprocess.Popen[bytes]) -> int:
        self._process = None
        kill_session(process.pid)
        self._pid_file.unlink(missing_ok=True)
        return process.wait()


class Supervisor:
    """`run` keeps every child alive until `stop` is set, then ends them in order."""

    def __init__(
        self,
        specs: list[ChildSpec],
        *,
        run_dir: Path,
        log_dir: Path,
        backoff: Backoff | None = None,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        log_dir.mkdir(parents=True, exist_ok=True)
        self.children = [Child(spec, run_dir=run_dir, log_dir=log_dir) for spec in specs]
        self.is_ready = False
        """Set by the caller; until then a child that refuses to start ends everything."""
        self._backoff = backoff or Backoff()
        self._restarts_file = run_dir / "restarts.json"

    async def run(self, stop: asyncio.Event) -> None:
        """Raises ConfigError when a child cannot start at all; the others are stopped first."""
        self._write_restarts()
        keepers = [asyncio.create_task(self._keep(child)) for child in self.children]
        stopper = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([*keepers, stopper], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*keepers, stopper):
                task.cancel()
            await asyncio.gather(*keepers, stopper, return_exceptions=True)
            await self._stop_all()
        for task in done:
            task.result()

    async def _keep(self, child: Child) -> None:
        num_crashes = 0
        while True:
            started = time.monotonic()
            child.start()
            code = await child.wait()
            is_calm = time.monotonic() - started > self._backoff.calm_s
            num_crashes = 1 if is_calm else num_crashes + 1
            self._refuse_hopeless(child, code, num_crashes)
            delay_s = self._backoff.delay_s(num_crashes)
            logger.warning(
                "%s ended with code %d, restart in %.1f s: %s",
                child.spec.name,
                code,
                delay_s,
                child.last_log_line(),
            )
            await asyncio.sleep(delay_s)
            child.num_restarts += 1
            self._write_restarts()

    def _refuse_hopeless(self, child: Child, code: int, num_crashes: int) -> None:
        is_hopeless = code == EXIT_REFUSED or num_crashes >= MAX_STARTS_BEFORE_READY
        if is_hopeless and not self.is_ready:
            raise ConfigError(
                f"{child.spec.name} cannot start (exit code {code}): {child.last_log_line()}; "
                f"see {child.log_file}"
            )

    async def _stop_all(self) -> None:
        for order in sorted({child.spec.stop_order for child in self.children}):
            together = [child for child in self.children if child.spec.stop_order == order]
            await asyncio.gather(*(child.stop() for child in together))

    def _write_restarts(self) -> None:
        counts = {child.spec.name: child.num_restarts for child in self.children}
        aside = self._restarts_file.with_suffix(".tmp")
        aside.write_text(json.dumps(counts))
        aside.replace(self._restarts_file)


async def _exit_of(process: subprocess.Popen[bytes]) -> None:
    """Returns when the process has ended; does not reap it."""
    if process.poll() is not None:
        return
    descriptor = os.pidfd_open(process.pid)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
