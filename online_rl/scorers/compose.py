"""Which scorer is responsible for which task. The one list of scorers there is."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from m1serve.envs import FAMILIES
from m1serve.errors import RewardError
from m1serve.online_rl.scorers.base import Scorer
from m1serve.online_rl.scorers.boxed import BoxedScorer
from m1serve.online_rl.scorers.env_replay import EnvReplayScorer
from m1serve.online_rl.scorers.format import FormatScorer
from m1serve.types import Reward, RewardStatus, Turn


class AllOf:
    """The smallest of several rewards; None as soon as one of them is."""

    def __init__(self, name: str, *parts: Scorer) -> None:
        self.name, self._parts = name, parts

    @property
    def version(self) -> str:
        return "+".join(f"{part.name}@{part.version}" for part in self._parts)

    def score(self, turns: Sequence[Turn], task_id: str) -> Reward:
        rewards = [part.score(turns, task_id) for part in self._parts]
        values = [r.value for r in rewards if r.value is not None]
        faulty = next((r.status for r in rewards if r.value is None), RewardStatus.OK)
        return Reward(
            value=min(values) if len(values) == len(rewards) else None,
            status=faulty,
            components={k: v for r in rewards for k, v in r.components.items()},
            evidence="; ".join(r.evidence for r in rewards),
        )


def preload() -> None:
    """What scorers import when first needed; it takes seconds on a busy machine."""
    for name in ("math_verify", "reasoning_gym"):
        importlib.import_module(name)


def choose(task_id: str) -> Scorer:
    """Raises RewardError for a task nobody can score; feedback may still reward it."""
    family = task_id.partition("/")[0]
    if family not in FAMILIES:
        raise RewardError(f"no scorer for task {task_id!r}; families are {', '.join(FAMILIES)}")
    return AllOf("boxed", BoxedScorer(), FormatScorer()) if family == "sums" else EnvReplayScorer()
