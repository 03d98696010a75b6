"""Runs scorers in a limited child that is reused, and replaced when it misbehaves.

Covered: exceptions, endless loops and sleeps (wall clock, then SIGKILL of the whole process group),
runaway memory (RLIMIT_AS), crashes of the interpreter, endless output, core dumps, large files,
leaked file descriptors, secrets in the environment (cleared), prints that would garble the
protocol, orphans (the child dies with its parent).
Not covered: the network, reading files the
worker's user can read, fork bombs when run as root, children that leave the process group, side
channels, and state that one job leaves behind for the next. Scorers are the operator's code fed
with the model's text; running code that the model wrote needs a container or bubblewrap around it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from m1serve.online_rl.scorers.base import reward_from_json, turn_to_json
from m1serve.types import Reward, RewardStatus, Turn

COMMAND = (sys.executable, "-I", "-m", "m1serve.online_rl.scorers.process")
START_S = 60.0
"""For a child to import the verifiers."""
MAX_ANSWER_BYTES = 2**20
JOBS_PER_CHILD = 2000
"""Then a fresh one, whatever leaked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A reward with the name of who gave it; both '' when no scorer got that far."""

    scorer: str
    version: str
    reward: Reward


class Sandbox:
    """One child, one job at a time; not for several threads. Close it, or use it as a context
    manager.
    """

    def __init__(
        self, *, timeout_s: float, memory_bytes: int, command: Sequence[str] = COMMAND
    ) -> None:
        self._timeout_s, self._memory_bytes, self._command = timeout_s, memory_bytes, command
        self._child: subprocess.Popen[bytes] | None = None
        self._num_jobs = 0
        self.num_starts = 0

    def score(self, turns: Sequence[Turn], task_id: str) -> Verdict:
        """Never raises for what a scorer does; a reward without a value says what happened."""
        if self._num_jobs >= JOBS_PER_CHILD:
            self.close()
        try:
            child = self._running_child()
            _send(child, {"task_id": task_id, "turns": [turn_to_json(t) for t in turns]})
            answer = _read(child, self._timeout_s)
        except TimeoutError:
            self.close()
            return _masked(RewardStatus.TIMEOUT, f"no answer within {self._timeout_s} s")
        except (OSError, EOFError, ValueError) as error:
            return _masked(RewardStatus.CRASHED, f"scorer process {self._ending()}: {error}")
        self._num_jobs += 1
        if "error" in answer:
            return _masked(RewardStatus.CRASHED, str(answer["error"]))
        return Verdict(
            scorer=answer["scorer"],
            version=answer["version"],
            reward=reward_from_json(answer["reward"]),
        )

    def close(self) -> None:
        """Kills the child and all it started."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                # closing flushes what a child that is gone never read
                with suppress(BrokenPipeError):
                    pipe.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _running_child(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self.close()
        self._child = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            cwd="/",
            start_new_session=True,
        )
        self.num_starts, self._num_jobs = self.num_starts + 1, 0
        _send(self._child, {"memory_bytes": self._memory_bytes, "cpu_s": self._timeout_s})
        _read(self._child, START_S)
        return self._child

    def _ending(self) -> str:
        """Ends the child and says how it had ended by itself."""
        child = self._child
        if child is None:
            return "did not start"
        try:
            code = child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        if code is None:
            return "broke the protocol"
        return f"died of signal {-code}" if code < 0 else f"exited with {code}"


def _send(child: subprocess.Popen[bytes], message: Mapping[str, object]) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps(message).encode() + b"\n")
    child.stdin.flush()


def _read(child: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any]:
    """One line. TimeoutError, EOFError when the child is gone, ValueError when it is not one JSON
    line.
    """
    assert child.stdout is not None
    end = time.monotonic() + timeout_s
    data = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while not data.endswith(b"\n"):
            if not selector.select(max(0.0, end - time.monotonic())):
                raise TimeoutError
            part = os.read(child.stdout.fileno(), 65536)
            if not part:
                raise EOFError("closed its pipe")
            data += part
            if len(data) > MAX_ANSWER_BYTES:
                raise ValueError(f"answered more than {MAX_ANSWER_BYTES} bytes")
    answer: dict[str, Any] = json.loads(data)
    return answer


def _masked(status: RewardStatus, evidence: str) -> Verdict:
    return Verdict(
        scorer="", version="", reward=Reward(value=None, status=status, evidence=evidence)
    )
