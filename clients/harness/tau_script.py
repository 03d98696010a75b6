"""TAU-bench's ground truth, read from the user's clone, as a script for the scripted engine."""

from __future__ import annotations

import ast
from pathlib import Path

from m1serve.clients.harness.play import (
    STOP,
    Call,
    Line,
    Part,
    agent_texts,
    script,
    with_wrong_argument,
)
from m1serve.errors import ConfigError

TASK_FILES = {"retail": "envs/retail/tasks_test.py", "airline": "envs/airline/tasks_test.py"}


def tau_script(clone: Path, domain: str, *, num_mutated: int = 0) -> list[Line]:
    """User and agent of every test task; the first `num_mutated` agents write something wrong."""
    users, agents = [], []
    told: set[str] = set()
    for index, task in enumerate(read_tasks(clone, domain)):
        name = f"TASK {domain} {index} :"
        # tasks with the same words have the same answers, and the first one's are played
        if task.instruction not in told:
            cue = f"Instruction: {task.instruction}\n"
            users.append(Part(cue=cue, texts=(f"{name} please see to it.", STOP)))
        told.add(task.instruction)
        calls = with_wrong_argument(task.calls) if index < num_mutated else task.calls
        agents.append(Part(cue=f"user\n{name}", texts=agent_texts(calls, task.outputs)))
    return script([*users, *agents])


class TauTask:
    """What the oracle needs of a task."""

    def __init__(self, raw: dict[str, object]) -> None:
        self.instruction = str(raw["instruction"])
        outputs, actions = raw["outputs"], raw["actions"]
        assert isinstance(outputs, list)
        assert isinstance(actions, list)
        self.outputs = [str(output) for output in outputs]
        self.calls = tuple(
            Call(name=action["name"], arguments=action["kwargs"])
            for action in actions
            if action["name"] != "respond"
        )


def read_tasks(clone: Path, domain: str) -> list[TauTask]:
    """Without importing the clone: its task files are one list of calls with literal arguments."""
    file = clone / "tau_bench" / TASK_FILES[domain]
    if not file.is_file():
        raise ConfigError(f"no tasks at {file}; --dir must be a clone of tau-bench")
    lists = [
        node.value
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
    ]
    if len(lists) != 1:
        raise ConfigError(f"{file} holds {len(lists)} lists of tasks, wanted 1; is it tau-bench?")
    return [TauTask(task) for task in _value(lists[0])]  # type: ignore[attr-defined]


def _value(node: ast.expr) -> object:
    if isinstance(node, ast.Call):
        return {word.arg: _value(word.value) for word in node.keywords if word.arg}
    if isinstance(node, ast.List):
        return [_value(item) for item in node.elts]
    return ast.literal_eval(node)
