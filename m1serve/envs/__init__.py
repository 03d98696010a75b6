"""Deterministic tasks with verifiers: an order desk with tools, sums, two reasoning-gym tasks."""

from m1serve.envs.base import (
    FAMILIES,
    SPLITS,
    Episode,
    Task,
    make_task,
    max_turns,
    open_episode,
    score_episode,
    task_ids,
    use_tool,
)

__all__ = [
    "FAMILIES",
    "SPLITS",
    "Episode",
    "Task",
    "make_task",
    "max_turns",
    "open_episode",
    "score_episode",
    "task_ids",
    "use_tool",
]
