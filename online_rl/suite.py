"""The gate's held-out suite: played on an engine, scored in the sandbox."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import GateSettings
from m1serve.engine.base import Engine
from m1serve.envs import FAMILIES, Task, make_task, task_ids
from m1serve.online_rl.gate import EpisodeResult
from m1serve.online_rl.play import PlayedEpisode, play_episodes
from m1serve.online_rl.scorers.base import is_solved
from m1serve.online_rl.scorers.sandbox import Sandbox

KL_EPISODES_PER_FAMILY = 4
"""Teacher-forcing every episode again would cost as much as playing it."""
SECOND_LOOK = 2
"""Times as many tasks again, of a family that seemed worse at the first look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Held-out tasks of the gate split, the same for every version; two results compare only under
    the same name.
    """

    name: str
    tasks: Mapping[str, Sequence[str]]
    """family -> task ids"""
    max_turn_tokens: int


def first_look(settings: GateSettings) -> Suite:
    num = settings.tasks_per_family
    families = settings.families or FAMILIES
    tasks = {f: task_ids("gate", f, num) for f in families}
    said = [make_task(task_id) for _, ids in sorted(tasks.items()) for task_id in ids]
    digest = exam_digest(said, settings.max_turn_tokens)
    name = f"gate/{num}/{','.join(sorted(families))}/{digest}"
    return Suite(name=name, tasks=tasks, max_turn_tokens=settings.max_turn_tokens)


def second_look(settings: GateSettings, families: Sequence[str]) -> Suite:
    """Tasks that the first look did not have."""
    first, num = settings.tasks_per_family, settings.tasks_per_family * (1 + SECOND_LOOK)
    tasks = {f: task_ids("gate", f, num)[first:] for f in families}
    # of the first look's tasks, so that a family's result is found whichever others were doubtful
    digest = first_look(settings).name.rpartition("/")[2]
    name = f"gate/{first}..{num}/{digest}"
    return Suite(name=name, tasks=tasks, max_turn_tokens=settings.max_turn_tokens)


def exam_digest(tasks: Iterable[Task], max_turn_tokens: int) -> str:
    """Of what the tasks say: other environments are another suite."""
    facts = [max_turn_tokens, [[t.task_id, t.system, t.tools, t.user] for t in tasks]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


async def play_suite(engine: Engine, tok: ChatTokenizer, suite: Suite) -> list[PlayedEpisode]:
    ids = [task_id for ids in suite.tasks.values() for task_id in ids]
    return await play_episodes(engine, tok, ids, max_turn_tokens=suite.max_turn_tokens)


def score_suite(episodes: Sequence[PlayedEpisode], sandbox: Sandbox) -> tuple[EpisodeResult, ...]:
    results = []
    for episode in episodes:
        turns = [t.turn for t in episode.turns]
        value = sandbox.score(turns, episode.task_id).reward.value
        results.append(
            EpisodeResult(
                task_id=episode.task_id,
                family=episode.task_id.partition("/")[0],
                is_solved=None if value is None else is_solved(value),
                num_turns=len(turns),
                num_well_formed=sum(t.is_well_formed for t in turns),
            )
        )
    return tuple(results)


async def mean_kl(parent: Engine, episodes: Sequence[PlayedEpisode]) -> float:
    """KL(candidate ‖ parent) a token on the candidate's own samples; k3 estimator, nan when nothing
    was sampled.
    """
    chosen: dict[str, list[PlayedEpisode]] = {}
    for episode in episodes:
        chosen.setdefault(episode.task_id.partition("/")[0], []).append(episode)
    last = [e.turns[-1] for es in chosen.values() for e in es[:KL_EPISODES_PER_FAMILY] if e.turns]
    scored = await asyncio.gather(
        *(parent.score((*turn.prompt_ids, *turn.completion_ids)) for turn in last)
    )
    terms = [
        math.exp(min(theirs - ours, 20.0)) - 1 - (theirs - ours)
        for turn, score in zip(last, scored, strict=True)
        for ours, theirs in zip(
            turn.logprobs, score.logprobs[len(turn.prompt_ids) - 1 :], strict=True
        )
    ]
    return math.fsum(terms) / len(terms) if terms else math.nan
