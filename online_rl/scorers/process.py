"""The sandbox's child: limits itself, then answers one JSON line a job until its input ends.

in   {"memory_bytes": 2147483648, "cpu_s": 11}      once
out  {"ready": true}
in   {"task_id": "sums/train/7", "turns": [...]}    a job
out  {"scorer": "boxed", "version": "1", "reward": {...}} | {"error": "..."}
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, TextIO

from m1serve.errors import RewardError
from m1serve.online_rl.scorers.base import Scorer, reward_to_json, turn_from_json
from m1serve.types import Reward, RewardStatus

NUM_OPEN_FILES = 64
FILE_BYTES = 1024 * 1024
PR_SET_PDEATHSIG = 1


def serve(choose: Callable[[str], Scorer]) -> None:
    """Runs until standard input ends. Whatever scorers print goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    limits = json.loads(sys.stdin.readline())
    _limit(memory_bytes=limits["memory_bytes"])
    _answer(answers, {"ready": True})
    for line in sys.stdin:
        _allow_cpu(limits["cpu_s"])
        _answer(answers, _score(choose, json.loads(line)))


def _score(choose: Callable[[str], Scorer], job: dict[str, Any]) -> dict[str, object]:
    try:
        scorer = choose(job["task_id"])
        turns = [turn_from_json(t) for t in job["turns"]]
        reward = scorer.score(turns, job["task_id"])
    except RewardError as error:
        return {"scorer": "", "version": "", "reward": reward_to_json(_uncomputable(error))}
    except Exception as error:  # noqa: BLE001 - the reward sandbox is one of the four edges
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    return {"scorer": scorer.name, "version": scorer.version, "reward": reward_to_json(reward)}


def _uncomputable(error: RewardError) -> Reward:
    return Reward(value=None, status=RewardStatus.UNCOMPUTABLE, evidence=str(error))


def _answer(answers: TextIO, answer: dict[str, object]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _limit(*, memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_OPEN_FILES, NUM_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _allow_cpu(cpu_s: float) -> None:
    """The CPU limit counts the life of the process, so every job moves it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(usage.ru_utime + usage.ru_stime + cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def main() -> None:
    # Verifiers are imported in the child only; a worker that merely delivers jobs never loads them.
    from m1serve.online_rl.scorers.compose import choose, preload

    # before the first job: its time must not pay for them
    preload()
    serve(choose)


if __name__ == "__main__":
    main()
