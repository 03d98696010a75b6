"""Own processes as children: how they are called, and that they end when their parent does.

The kernel sends SIGTERM to the child when the parent dies, even by SIGKILL (PR_SET_PDEATHSIG,
Linux). The child asks for it itself, so nothing runs between fork and exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "PARENT_OF_M1SERVE"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def own_command(*arguments: str) -> tuple[str, ...]:
    """argv of another `m1serve`; -P keeps the working directory off its module path."""
    return (sys.executable, "-P", "-m", "m1serve.cli", *arguments)


def tied_environment(environment: dict[str, str], *, num_threads: int) -> dict[str, str]:
    """For a child that must end with this process, with a bound on its compute threads.

    They sleep at their barriers: threads that spin while other processes have the cores cost 10x.
    """
    threads = dict.fromkeys(THREAD_VARIABLES, str(num_threads))
    passive = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    return {**environment, **threads, **passive, PARENT_VARIABLE: str(os.getpid())}


def kill_session(leader: int) -> None:
    """SIGKILL to every process of a session; Ray's workers lead groups of their own in it."""
    killed: set[int] = set()
    # again for those that were forked meanwhile
    while members := _members_of(leader) - killed:
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        killed |= members


def _members_of(leader: int) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[3] == str(leader) and fields[0] != "Z":
            found.add(int(entry.name))
    return found


def die_with_parent() -> None:
    """Does nothing unless the parent asked for it."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit(f"the process that started this one (pid {parent}) is gone")
