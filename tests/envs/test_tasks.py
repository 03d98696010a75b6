from __future__ import annotations

import random
import re
import subprocess
import sys
from itertools import combinations
from typing import Any

import pytest

from m1serve.envs import FAMILIES, SPLITS, make_task, max_turns, open_episode, task_ids
from m1serve.envs.arithmetic import evaluate
from m1serve.envs.base import Problem, build_problem
from m1serve.envs.desk import DESK_FAMILIES, DeskProblem, operands
from m1serve.envs.maths import GymProblem, SumProblem, gym_key
from m1serve.envs.policy import FEES, make_desk
from m1serve.envs.wording import ask, kinds, mistype, templates
from m1serve.errors import ConfigError


def key_of(problem: Problem) -> set[str]:
    """What may occur in one split only: order ids, operands, a question."""
    if isinstance(problem, GymProblem):
        return {gym_key(problem.task.family, problem.entry)}
    if isinstance(problem, SumProblem):
        return {operands(problem.expression)}
    assert isinstance(problem, DeskProblem)
    return {operands(problem.expression)} if problem.expression else set(problem.ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_splits_share_no_ids_operands_or_questions(family: str) -> None:
    keys = {
        split: {k for i in task_ids(split, family, 300) for k in key_of(build_problem(i))}
        for split in SPLITS
    }
    for a, b in combinations(SPLITS, 2):
        assert not keys[a] & keys[b]


@pytest.mark.parametrize("kind", kinds())
def test_splits_share_no_wordings(kind: str) -> None:
    seen = [{t.lower() for t in templates(kind, split)} for split in SPLITS]
    assert all(not a & b for a, b in combinations(seen, 2))
    assert min(len(s) for s in seen) >= 2


def test_a_request_has_many_wordings() -> None:
    rng = random.Random(0)
    for kind in ("status", "item", "price", "cancel", "refund", "compare", "calc"):
        slots = {"a": "order 4217", "b": "#5310", "e": "3 + 4"}
        assert len({ask(kind, "train", rng, **slots) for _ in range(400)}) > 60


def test_typing_slips_never_touch_digits() -> None:
    rng = random.Random(1)
    text = "please refund order 4217, 12 * 34"
    for _ in range(200):
        assert re.findall(r"\d+", mistype(text, rng)) == ["4217", "12", "34"]


def test_a_task_is_made_from_its_id_alone() -> None:
    ids = [f"{family}/{split}/7" for family in FAMILIES for split in SPLITS]
    assert [make_task(i) for i in ids] == [make_task(i) for i in ids]
    code = "import sys, m1serve.envs as e\nfor i in sys.argv[1:]: print(repr(e.make_task(i)))"
    out = subprocess.run(
        [sys.executable, "-c", code, *ids], capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines() == [repr(make_task(i)) for i in ids]


@pytest.mark.parametrize(
    "task_id",
    ["", "lookup", "lookup/train", "lookup/test/1", "chess/train/1", "lookup/train/x",
     "lookup/train/-1", "lookup/train/01", "lookup/train/²", "lookup/train/1/2",
     "lookup/train/1234567890123"],
)  # fmt: skip
def test_an_id_that_names_no_task_is_refused(task_id: str) -> None:
    with pytest.raises(ConfigError, match="no such task"):
        make_task(task_id)


def test_other_seeds_give_other_ids() -> None:
    first, second = task_ids("train", "sums", 50), task_ids("train", "sums", 50, seed=1)
    assert len(first) == 50
    assert not set(first) & set(second)
    assert task_ids("train", "sums", 50) == first


def test_ids_of_an_unknown_family_or_too_many_are_refused() -> None:
    with pytest.raises(ConfigError, match="no such task"):
        task_ids("train", "chess", 1)
    with pytest.raises(ConfigError, match="out of range"):
        task_ids("train", "sums", 10**7)


def test_neighbours_share_a_desk_whatever_their_family() -> None:
    assert len({make_task(f"{f}/train/{n}").system for f in DESK_FAMILIES for n in range(4)}) == 1
    assert len({make_task(f"lookup/train/{4 * n}").system for n in range(30)}) > 20


def test_desks_differ_in_policy_and_tools() -> None:
    desks = [make_desk(random.Random(i)) for i in range(200)]
    policies = {d.policy for d in desks}
    assert {p.fee for p in policies} == set(FEES)
    assert {p.fee_tier for p in policies} == {"basic", "gold"}
    assert {p.cancel for p in policies} == {(), ("pending",), ("pending", "shipped")}
    assert {p.refund for p in policies} == {(), ("delivered",), ("delivered", "shipped")}
    tool_lists = {tuple(t["name"] for t in d.tools) for d in desks}
    assert {len(names) for names in tool_lists} == {4, 5}
    assert len(tool_lists) > 20


def test_the_policy_decides_the_answer() -> None:
    answers = {build_problem(i).answer for i in task_ids("train", "cancel", 200)}
    assert answers == {"cancelled", "not allowed", "not found"}


def test_a_desk_says_what_its_policy_is() -> None:
    for i in range(50):
        desk = make_desk(random.Random(i))
        for statuses in (desk.policy.cancel, desk.policy.refund):
            assert " or ".join(statuses) in desk.system
        if desk.policy.refund:
            assert f"{desk.policy.fee}" in desk.system
            assert f"tier is {desk.policy.fee_tier}" in desk.system or (
                f"tier {desk.policy.fee_tier}" in desk.system
            )


def test_an_episode_is_private_and_keeps_its_transcript() -> None:
    task_id = next(i for i in task_ids("train", "cancel", 50) if build_problem(i).orders)
    (order_id,) = build_problem(task_id).ids
    first, second = open_episode(task_id), open_episode(task_id)
    assert first.call("cancel_order", {"order_id": order_id}) == "ok"
    assert "cancelled" in first.call("get_order", {"order_id": order_id})
    assert [u.name for u in first.transcript] == ["cancel_order", "get_order"]
    assert second.transcript == ()


def test_tools_answer_mistakes_with_an_error() -> None:
    episode = open_episode("calc/train/1")
    assert episode.call("calculator", {"expression": "12 * (3 + 4)"}) == "84"
    for name, arguments in (
        ("calculator", {"expression": "2 ** 9"}),
        ("calculator", {"expression": "__import__('os')"}),
        ("calculator", {}),
        ("get_order", {"order_id": "1"}),
        ("get_order", {}),
        ("refund_order", {"order_id": "1", "amount": "3"}),
        ("no_such_tool", {}),
    ):
        assert episode.call(name, arguments).startswith("error")


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1 + 2 * 3", 7), ("(1+2)*3", 9), ("-4 - -5", 1), ("7", 7), ("", None), ("1 +", None),
     ("1 / 2", None), ("2 ** 3", None), ("()", None), ("1, 2", None), ("(" * 70, None)],
)  # fmt: skip
def test_the_calculator_knows_three_operations(expression: str, value: Any) -> None:
    assert evaluate(expression) == value


def test_maths_takes_one_turn_and_the_desk_six() -> None:
    assert [max_turns(f"{f}/train/1") for f in ("lookup", "refund", "sums", "gcd")] == [6, 6, 1, 1]


def test_importing_the_environments_does_not_import_reasoning_gym() -> None:
    code = "import sys, m1serve.envs; assert 'reasoning_gym' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_order_ids_of_a_request_are_mentioned_in_it() -> None:
    for family in ("lookup", "cancel", "compare", "refund"):
        for task_id in task_ids("report", family, 40):
            problem = build_problem(task_id)
            assert isinstance(problem, DeskProblem)
            assert set(re.findall(r"\d{4}", problem.task.user)) == set(problem.ids)
