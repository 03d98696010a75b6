"""Questions without tools that end in \\boxed{}: our own sums, and two tasks of reasoning-gym."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from m1serve.envs.arithmetic import evaluate
from m1serve.envs.desk import operands
from m1serve.envs.task import Episode, NoTools, Task, TaskId, Verdict, split_of
from m1serve.envs.wording import ask

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
GYM_TASKS: dict[str, dict[str, object]] = {
    "aiw": {"task_type_weights": [0.5, 0.5], "max_entities": 9},
    "gcd": {"min_value": 2, "max_value": 60},
}
"""Family = name in reasoning-gym, with the settings of its generator."""
MATHS_FAMILIES = ("sums", *GYM_TASKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SumProblem:
    task: Task
    expression: str
    answer: str
    max_turns: int = 1

    def open(self) -> NoTools:
        return NoTools()

    def judge(self, content: str, episode: Episode) -> Verdict:
        said = boxed(content)
        is_right = said is not None and re.fullmatch(r"-?\d{1,9}", said) is not None
        is_right = is_right and int(said or 0) == int(self.answer)
        evidence = f"wanted {self.answer} for {self.expression}, got {said!r} in {content!r}"
        return Verdict(components={"answer": float(is_right)}, evidence=evidence, notes={})


@dataclass(frozen=True, slots=True, kw_only=True)
class GymProblem:
    task: Task
    entry: dict[str, Any]
    """As reasoning-gym made it: question, answer, metadata."""
    max_turns: int = 1

    def open(self) -> NoTools:
        return NoTools()

    def judge(self, content: str, episode: Episode) -> Verdict:
        """Full marks only: the package pays "14" half when "4" is right."""
        said = boxed(content)
        score = float(_generator(self.task.family).score_answer(said, self.entry))
        evidence = (
            f"reasoning-gym {self.task.family} gave {score:g} to {said!r}, its own answer is "
            f"{self.entry['answer']!r}"
        )
        right = {"answer": float(score >= 0.999)}
        return Verdict(components=right, evidence=evidence, notes={"reasoning_gym": score})


def boxed(content: str) -> str | None:
    """What stands in the only \\boxed{}; None when there is none, or several."""
    found = re.findall(r"\\boxed\{([^{}]*)\}", content)
    return found[0].strip() if len(found) == 1 else None


def build_sum_problem(task_id: TaskId) -> SumProblem:
    rng = random.Random(str(task_id))
    while True:
        expression = _draw_sum(rng)
        if split_of(operands(expression)) == task_id.split:
            break
    text = _ask_sum(expression, task_id.split, rng)
    answer = str(evaluate(expression))
    return SumProblem(task=_task(task_id, text), expression=expression, answer=answer)


def _draw_sum(rng: random.Random) -> str:
    """Mostly one operation on one or two digits, sometimes three numbers; never below zero."""
    a, b = (rng.randrange(1, 10 if rng.random() < 0.2 else 100) for _ in range(2))
    roll = rng.random()
    if roll < 0.45:
        return f"{a} + {b}"
    if roll < 0.8:
        return f"{max(a, b)} - {min(a, b)}"
    c = rng.randrange(1, 100)
    return f"{a} + {b} + {c}" if roll < 0.9 or c > a + b else f"{a} + {b} - {c}"


def _ask_sum(expression: str, split: str, rng: random.Random) -> str:
    parts = expression.split()
    if len(parts) == 3 and rng.random() < 0.5:
        kind = "add" if parts[1] == "+" else "subtract"
        return ask(kind, split, rng, x=parts[0], y=parts[2])
    shown = expression.replace(" ", "") if rng.random() < 0.3 else expression
    return ask("calc", split, rng, e=shown)


def build_gym_problem(task_id: TaskId) -> GymProblem:
    """The generator's questions in order, each in the split its key falls into."""
    generator = _generator(task_id.family)
    rng = random.Random(str(task_id))
    while True:
        entry = generator[rng.randrange(2**31)]
        if entry["answer"] != "1" and split_of(gym_key(task_id.family, entry)) == task_id.split:
            return GymProblem(task=_task(task_id, entry["question"]), entry=entry)


def gym_key(family: str, entry: dict[str, Any]) -> str:
    if family == "gcd":
        return " ".join(map(str, sorted(entry["metadata"]["numbers"])))
    return str(entry["question"])


@cache
def _generator(family: str) -> Any:  # noqa: ANN401 reasoning-gym has no types
    # a second and 60 modules: only for who needs it
    import reasoning_gym
    from reasoning_gym.logic.aiw import TaskType

    settings = GYM_TASKS[family]
    if family == "aiw":
        settings = {**settings, "task_types": [TaskType.SIBLINGS, TaskType.FRIENDS]}
    return reasoning_gym.create_dataset(family, seed=0, size=2**31, **settings)


def _task(task_id: TaskId, user: str) -> Task:
    return Task(
        task_id=str(task_id),
        family=task_id.family,
        split=task_id.split,
        system=SYSTEM,
        tools=(),
        user=user,
    )
