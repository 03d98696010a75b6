"""How the clerk does sums, common divisors and the sisters puzzle: step by step, or off-hand."""

from __future__ import annotations

import math
import random
import re

from m1serve.envs.maths import GymProblem, SumProblem
from m1serve.envs.saying import Clerk, Say, Shortcuts

_IN_MY_HEAD = "I can do this in my head."
_GUESSES = (-10, -2, -1, 0, 0, 1, 2, 10)


def _box(value: object) -> str:
    return f"\\boxed{{{value}}}"


def solve_sum(
    problem: SumProblem, rng: random.Random, shortcuts: Shortcuts, is_hasty: bool
) -> Clerk:
    if is_hasty:
        guess = max(0, int(problem.answer) + rng.choice(_GUESSES))
        yield Say(thought=_IN_MY_HEAD, content=_box(guess))
        return
    first, *rest = problem.expression.split()
    total, lines = int(first), list[str]()
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        steps, total = _by_digits(total, int(number), sign)
        lines += steps
    if rng.random() < shortcuts.slip:
        total = max(0, total + rng.choice((-10, -1, 1, 10)))
    yield Say(thought="\n".join(lines), content=_box(total))


def _by_digits(a: int, b: int, sign: str) -> tuple[list[str], int]:
    """Column by column from the right, with what is carried or borrowed; never below zero."""
    assert sign == "+" or a >= b, "a borrow would never end"
    lines = [f"{a} {sign} {b}"]
    result = a + b if sign == "+" else a - b
    x, y, carry = a, b, 0
    while x or y or carry:
        lines.append(_column(x % 10, y % 10, carry, sign))
        carry = _carry(x % 10, y % 10, carry, sign)
        x, y = x // 10, y // 10
    lines.append(f"so {result}")
    return lines, result


def _column(x: int, y: int, carry: int, sign: str) -> str:
    extra = f" {sign} 1" if carry else ""
    if sign == "+":
        return f"{x} + {y}{extra} = {x + y + carry}"
    top = x + 10 if x - y - carry < 0 else x
    return f"{top} - {y}{extra} = {top - y - carry}"


def _carry(x: int, y: int, carry: int, sign: str) -> int:
    return int(x + y + carry > 9) if sign == "+" else int(x - y - carry < 0)


def solve_gym(
    problem: GymProblem, rng: random.Random, shortcuts: Shortcuts, is_hasty: bool
) -> Clerk:
    numbers = [int(n) for n in re.findall(r"\d+", problem.task.user)]
    if problem.task.family == "gcd":
        yield from _divide(numbers, rng, shortcuts, is_hasty)
    else:
        yield from _count_sisters(problem.task.user, numbers, rng, is_hasty)


def _divide(numbers: list[int], rng: random.Random, shortcuts: Shortcuts, is_hasty: bool) -> Clerk:
    if is_hasty:
        yield Say(thought=_IN_MY_HEAD, content=_box(rng.choice((1, 2, 3, 4, 5, 6))))
        return
    small, large = sorted(numbers)
    lists = {n: [d for d in range(n, 0, -1) if n % d == 0] for n in (small, large)}
    lines = [f"{n}: {', '.join(map(str, lists[n]))}" for n in (small, large)]
    tried = lists[small][: lists[small].index(math.gcd(small, large)) + 1]
    if rng.random() < shortcuts.slip:
        tried = [*tried, *lists[small][len(tried) : len(tried) + 1]]
    lines += [f"{d}: no" for d in tried[:-1]] + [f"{tried[-1]}: yes"]
    yield Say(thought="\n".join(lines), content=_box(tried[-1]))


def _count_sisters(question: str, numbers: list[int], rng: random.Random, is_hasty: bool) -> Clerk:
    """The woman spoken of is one of the sisters, or of the female friends."""
    found = re.search(r"(\d+) (sisters|female friends)", question)
    assert found is not None
    count, kind = int(found[1]), found[2]
    name = question.split()[0]
    if is_hasty:
        # as large models do: the number as it stands, sometimes the wrong one
        value = count if rng.random() < 0.7 else rng.choice(numbers)
        yield Say(thought=_IN_MY_HEAD, content=_box(value))
        return
    thought = f"{name} has {count} {kind}. {name} counts too: {count} + 1 = {count + 1}"
    yield Say(thought=thought, content=_box(count + 1))
