"""One supervisor a home: an flock that dies with its process, and the pid files of the children."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from m1serve.cli.lifeline import kill_session
from m1serve.errors import ConfigError


@contextmanager
def lock_home(home: Path) -> Iterator[None]:
    """Holds `home` for this process. Raises ConfigError when another `up` has it."""
    run_dir = home / "run"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir / "up.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(
            f"cannot write in {home}: {error}; choose another directory with --home"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode() or "unknown"
            raise ConfigError(
                f"{home} is in use by another `m1serve up` (pid {holder}); "
                "stop it or choose another --home"
            ) from None
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
        os.truncate(descriptor, 0)
    finally:
        os.close(descriptor)


def end_leftovers(home: Path, *, grace_s: float) -> list[str]:
    """Ends children that outlived a killed supervisor of this home; returns their names.

    A pid file alone proves nothing, since pids are reused: the process must carry this home in its
    environment.
    """
    leftovers: dict[str, int] = {}
    for pid_file in sorted((home / "run").glob("*.pid")):
        text = pid_file.read_text().strip()
        if text.isdigit() and _belongs_to(int(text), home):
            leftovers[pid_file.stem] = int(text)
        pid_file.unlink()
    for pid in leftovers.values():
        _signal_group(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(_belongs_to(pid, home) for pid in leftovers.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in leftovers.values():
        kill_session(pid)
    return list(leftovers)


def _belongs_to(pid: int, home: Path) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and f"M1SERVE_HOME={home}".encode() in environment


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return
