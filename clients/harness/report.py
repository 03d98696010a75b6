"""What a run of a benchmark came to, whichever it was."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path

from m1serve.errors import ConfigError

SOLVED = 1 - 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    task: str
    reward: float
    error: str | None = None
    """Why the harness gave the task up, in its words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessReport:
    harness: str
    commit: str | None
    protocol: str
    model: str
    user_model: str | None
    attempts: tuple[Attempt, ...]
    wall_s: float
    results: str
    """Where the harness left its own results."""
    warning: str | None = None

    @property
    def reward(self) -> float:
        return sum(a.reward for a in self.attempts) / len(self.attempts)

    @property
    def num_tasks(self) -> int:
        return len({a.task for a in self.attempts})

    def as_json(self) -> dict[str, object]:
        return {
            **asdict(self),
            "tasks": self.num_tasks,
            "reward": self.reward,
            "pass_hat": pass_hat(self.attempts),
            "errors": sum(a.error is not None for a in self.attempts),
        }


def pass_hat(attempts: tuple[Attempt, ...]) -> dict[str, float]:
    """pass^k of the TAU-bench paper: the chance that k attempts at a task all solve it."""
    tries: dict[str, list[bool]] = {}
    for attempt in attempts:
        tries.setdefault(attempt.task, []).append(attempt.reward >= SOLVED)
    num_trials = min(map(len, tries.values()))
    return {
        str(k): sum(comb(sum(t), k) / comb(len(t), k) for t in tries.values()) / len(tries)
        for k in range(1, num_trials + 1)
    }


def newest(directory: Path, pattern: str, log_file: Path) -> Path:
    """The harness's own result file. Raises ConfigError with its log's end if there is none."""
    found = sorted(directory.glob(pattern), key=lambda file: file.stat().st_mtime)
    if not found:
        log = log_file.read_text(errors="replace")[-1500:] if log_file.is_file() else ""
        raise ConfigError(f"the harness left no results; the end of {log_file}:\n{log}")
    return found[-1]


def write_report(report: HarnessReport, out: Path) -> None:
    text = json.dumps(report.as_json(), indent=1)
    (out / "report.json").write_text(text + "\n", encoding="utf-8")
