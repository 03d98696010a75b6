"""The Scorer contract, and its values as JSON for the pipe to the sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from m1serve.types import Reward, RewardStatus, StopCause, ToolCall, Turn


class Scorer(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str:
        """Changes whenever the same turns could get another reward."""
        ...

    def score(self, turns: Sequence[Turn], task_id: str) -> Reward:
        """Pure. May raise, hang or crash: it runs in the sandbox, and the caller makes that a
        masked reward.
        """
        ...


def turn_to_json(turn: Turn) -> dict[str, object]:
    return asdict(turn)


def turn_from_json(data: Mapping[str, Any]) -> Turn:
    calls = tuple(ToolCall(**call) for call in data["tool_calls"])
    return Turn(**{**data, "tool_calls": calls, "stop": StopCause(data["stop"])})


def reward_to_json(reward: Reward) -> dict[str, object]:
    return {
        "value": reward.value,
        "status": reward.status.value,
        "components": dict(reward.components),
        "evidence": reward.evidence,
    }


def reward_from_json(data: Mapping[str, Any]) -> Reward:
    return Reward(**{**data, "status": RewardStatus(data["status"])})


def is_solved(value: float) -> bool:
    """A reward as success or failure."""
    return value > 0.5
