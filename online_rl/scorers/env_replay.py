"""Scores by replaying the turns' tool calls in a fresh world and looking at what became of it."""

from __future__ import annotations

from collections.abc import Sequence

from m1serve.envs import score_episode
from m1serve.types import Reward, Turn


class EnvReplayScorer:
    name = "env_replay"
    version = "1"

    def score(self, turns: Sequence[Turn], task_id: str) -> Reward:
        return score_episode(task_id, turns)
