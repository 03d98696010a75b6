"""Scores the one \\boxed{} of the last turn against the task's answer, compared by math-verify.

math-verify would also accept \\boxed{23+45} for 68. The box must therefore hold a single number;
how it is written (68, 68.0, \\text{68}) is math-verify's business.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from m1serve.envs.base import build_problem
from m1serve.envs.maths import SumProblem, boxed
from m1serve.errors import RewardError
from m1serve.types import Reward, Turn

_ONE_NUMBER = re.compile(r"[^\d]*\d[\d,]*(\.\d+)?[^\d]*")


class BoxedScorer:
    name = "boxed"
    version = "1"

    def score(self, turns: Sequence[Turn], task_id: str) -> Reward:
        problem = build_problem(task_id)
        if not isinstance(problem, SumProblem):
            raise RewardError(f"boxed scores sums, {task_id} has no numeric answer")
        said = boxed(turns[-1].content) if turns else None
        value = float(said is not None and is_equal(said, problem.answer))
        return Reward(
            value=value,
            components={"answer": value},
            evidence=f"wanted {problem.answer} for {problem.expression}, the box holds {said!r}",
        )


def is_equal(said: str, answer: str) -> bool:
    if not _ONE_NUMBER.fullmatch(said):
        return False
    # sympy takes a second; only for who needs it
    from math_verify import parse, verify

    # no timeouts of its own: they need signals, and the sandbox has a wall clock
    parsed = [parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (answer, said)]
    return bool(verify(*parsed, timeout_seconds=None))
