"""A scripted agent for every family: careful it is always right, with shortcuts it often is not.

It reads what an agent may read (request, policy, tool results); its turns make the demonstrations
of the cold start, and the careful one is the oracle of tests.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from m1serve.envs.base import Problem
from m1serve.envs.clerk_desk import serve_desk
from m1serve.envs.clerk_maths import solve_gym, solve_sum
from m1serve.envs.desk import DeskProblem
from m1serve.envs.maths import GymProblem, SumProblem
from m1serve.envs.saying import CAREFUL, Clerk, Say, Shortcuts


def clerk(problem: Problem, rng: random.Random, shortcuts: Shortcuts = CAREFUL) -> Clerk:
    is_hasty = rng.random() < shortcuts.hasty.get(problem.task.family, 0.0)
    if isinstance(problem, DeskProblem):
        return serve_desk(problem, rng, shortcuts, is_hasty)
    if isinstance(problem, SumProblem):
        return solve_sum(problem, rng, shortcuts, is_hasty)
    assert isinstance(problem, GymProblem)
    return solve_gym(problem, rng, shortcuts, is_hasty)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    said: tuple[Say, ...]
    results: tuple[tuple[str, ...], ...]
    """Of the calls of each turn."""


def play(problem: Problem, rng: random.Random, shortcuts: Shortcuts = CAREFUL) -> Played:
    """One whole episode."""
    episode = problem.open()
    said: list[Say] = []
    results: list[tuple[str, ...]] = []
    turns = clerk(problem, rng, shortcuts)
    say = next(turns)
    while True:
        said.append(say)
        results.append(tuple(episode.call(c.name, dict(c.arguments)) for c in say.calls))
        if not say.calls:
            return Played(said=tuple(said), results=tuple(results))
        say = turns.send(results[-1])
