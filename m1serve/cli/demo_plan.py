"""How much the demo does: sizes, tasks and plans of episodes. Pure and deterministic."""

from __future__ import annotations

from dataclasses import dataclass

from m1serve.clients.agent import EpisodePlan
from m1serve.envs import FAMILIES, task_ids
from m1serve.types import Mode

GROUP_SIZE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSize:
    num_cycles: int
    groups_per_family: int
    """Tasks of each family a cycle; each is played GROUP_SIZE times."""
    poisoned_groups_per_family: int
    eval_tasks_per_family: int


FULL = DemoSize(
    num_cycles=9, groups_per_family=3, poisoned_groups_per_family=4, eval_tasks_per_family=60
)
SMALL = DemoSize(
    num_cycles=2, groups_per_family=2, poisoned_groups_per_family=3, eval_tasks_per_family=6
)


def training_plans(cycle: int, *, groups_per_family: int, seed: int) -> list[EpisodePlan]:
    """Groups of the train split; other tasks in every cycle, the same system prompt within one."""
    return [
        EpisodePlan(
            task_id=task_id,
            session_id=f"cycle{cycle}-{task_id.replace('/', '-')}-{place}",
            group_key=f"cycle{cycle}-{task_id}",
            mode=Mode.TRAIN,
        )
        for family in FAMILIES
        for task_id in task_ids("train", family, groups_per_family, 1000 * seed + cycle)
        for place in range(GROUP_SIZE)
    ]


def evaluation_plans(label: str, *, tasks_per_family: int, seed: int) -> list[EpisodePlan]:
    """Held-out tasks, once each; the same for every label."""
    return [
        EpisodePlan(
            task_id=task_id,
            session_id=f"{label}-{task_id.replace('/', '-')}",
            group_key=f"{label}-{task_id}",
            mode=Mode.EVAL,
        )
        for family in FAMILIES
        for task_id in task_ids("report", family, tasks_per_family, seed)
    ]
