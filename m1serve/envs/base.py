"""The environments: deterministic tasks to act on, and the verifier that replays what was done.

A task is made from its id alone, `<family>/<split>/<number>`; splits never share order ids,
operands or wordings.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from m1serve.envs.desk import DESK_FAMILIES, build_desk_problem
from m1serve.envs.maths import (
    MATHS_FAMILIES,
    build_gym_problem,
    build_sum_problem,
)
from m1serve.envs.task import SPLITS, Episode, Problem, Task, TaskId, ToolUse, Verdict
from m1serve.errors import ConfigError
from m1serve.types import Reward, RewardStatus, StopCause, Turn

__all__ = [
    "FAMILIES",
    "SPLITS",
    "Episode",
    "Problem",
    "Task",
    "ToolUse",
    "build_problem",
    "make_task",
    "max_turns",
    "open_episode",
    "score_episode",
    "task_ids",
    "use_tool",
]

FAMILIES = (*DESK_FAMILIES, *MATHS_FAMILIES)
_SEED_STRIDE = 1_000_000


def build_problem(task_id: str) -> Problem:
    """The task with its expected result: for scorers and demonstrations, never for an agent."""
    parsed = TaskId.parse(task_id, FAMILIES)
    if parsed.family in DESK_FAMILIES:
        return build_desk_problem(parsed)
    return build_sum_problem(parsed) if parsed.family == "sums" else build_gym_problem(parsed)


def make_task(task_id: str) -> Task:
    return build_problem(task_id).task


def open_episode(task_id: str) -> Episode:
    return build_problem(task_id).open()


def max_turns(task_id: str) -> int:
    return build_problem(task_id).max_turns


def task_ids(split: str, family: str, count: int, seed: int = 0) -> list[str]:
    """Other seeds give other ids; families share system prompts under the same seed."""
    if not 0 <= count <= _SEED_STRIDE or not 0 <= seed < 1_000_000:
        raise ConfigError(f"count {count} or seed {seed} is out of range: both below a million")
    ids = [f"{family}/{split}/{seed * _SEED_STRIDE + i}" for i in range(count)]
    for task_id in ids[:1]:
        TaskId.parse(task_id, FAMILIES)
    return ids


def use_tool(episode: Episode, name: str, arguments: str) -> str:
    """What an agent gets for a call as the model wrote it; no JSON object is an error."""
    parsed = _arguments(arguments)
    if parsed is None:
        return "error: arguments are not a JSON object"
    return episode.call(name, parsed)


def score_episode(task_id: str, turns: Sequence[Turn]) -> Reward:
    """1 when everything holds, else 0. Tool results are computed anew, whatever a client sent."""
    problem = build_problem(task_id)
    if not turns or turns[-1].stop in (StopCause.ABORT, StopCause.ERROR):
        evidence = "no finished turn to score"
        return Reward(value=None, status=RewardStatus.UNCOMPUTABLE, evidence=evidence)
    episode = problem.open()
    format_faults = _replay(turns, episode, problem.max_turns)
    last = turns[-1]
    verdict = problem.judge("" if last.tool_calls else last.content, episode)
    components = {**verdict.components, "format": float(not format_faults)}
    return Reward(
        value=float(all(components.values())),
        components={**components, **verdict.notes},
        evidence=_evidence(verdict, format_faults),
    )


def _replay(turns: Sequence[Turn], episode: Episode, limit: int) -> list[str]:
    """Plays the tool calls of `turns` in `episode`; returns what is wrong with their form."""
    faults = [f"{len(turns)} turns, at most {limit} allowed"] if len(turns) > limit else []
    for number, turn in enumerate(turns[:limit], 1):
        if not turn.is_well_formed or turn.reasoning is None:
            faults.append(f"turn {number} is not a think block and a reply")
        if turn.stop is not StopCause.EOS:
            faults.append(f"turn {number} stopped by {turn.stop}")
        for call in turn.tool_calls:
            arguments = _arguments(call.arguments)
            if arguments is None:
                faults.append(f"turn {number}: arguments of {call.name[:40]!r} are no JSON object")
            else:
                episode.call(call.name, arguments)
    if turns[-1].tool_calls:
        faults.append("the last turn still calls tools")
    return faults


def _arguments(text: str) -> dict[str, object] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _evidence(verdict: Verdict, format_faults: list[str]) -> str:
    return f"{verdict.evidence}; format: {', '.join(format_faults) or 'ok'}"
