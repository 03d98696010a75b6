from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from m1serve.envs import FAMILIES, SPLITS, make_task, score_episode, task_ids
from m1serve.envs.base import build_problem
from m1serve.envs.desk import DeskProblem, states
from m1serve.envs.saying import Say, Shortcuts
from m1serve.types import RewardStatus, StopCause, ToolCall, Turn


def rate(
    family: str,
    split: str,
    clerk_turns: Callable[..., list[Turn]],
    shortcuts: Shortcuts,
    count: int = 60,
) -> float:
    ids = task_ids(split, family, count, seed=3)
    rewards = [score_episode(i, clerk_turns(i, shortcuts)).value for i in ids]
    return sum(r or 0.0 for r in rewards) / count


def find(family: str, wanted: Callable[[Any], object]) -> str:
    """The first training task whose problem satisfies `wanted`."""
    ids = task_ids("train", family, 500, seed=9)
    return next(i for i in ids if wanted(build_problem(i)))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_careful_clerk_is_always_right(
    family: str, split: str, clerk_turns: Callable[..., list[Turn]]
) -> None:
    for task_id in task_ids(split, family, 60, seed=2):
        reward = score_episode(task_id, clerk_turns(task_id))
        assert reward.value == 1.0, (task_id, reward.evidence)
        assert set(reward.components.values()) == {1.0}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_hasty_clerk_is_mostly_wrong(
    family: str, clerk_turns: Callable[..., list[Turn]]
) -> None:
    hasty = Shortcuts(hasty={family: 1.0})
    assert rate(family, "train", clerk_turns, hasty) < 0.4


@pytest.mark.parametrize("family", ["lookup", "compare", "cancel"])
def test_who_does_not_look_an_order_up_earns_nothing(
    family: str, clerk_turns: Callable[..., list[Turn]]
) -> None:
    assert rate(family, "train", clerk_turns, Shortcuts(hasty={family: 1.0})) == 0.0


def test_ignoring_the_policy_is_wrong_exactly_where_it_forbids(
    clerk_turns: Callable[..., list[Turn]],
) -> None:
    always = Shortcuts(ignore_policy=1.0)
    for task_id in task_ids("train", "cancel", 80, seed=4):
        problem = build_problem(task_id)
        assert isinstance(problem, DeskProblem)
        is_forbidden = problem.answer == "not allowed" and bool(problem.desk.policy.cancel)
        reward = score_episode(task_id, clerk_turns(task_id, always))
        assert reward.value == float(not is_forbidden), reward.evidence


def test_forgetting_the_fee_is_wrong_exactly_where_there_is_one(
    clerk_turns: Callable[..., list[Turn]],
) -> None:
    always = Shortcuts(forget_fee=1.0)
    rewards = set()
    for task_id in task_ids("train", "refund", 80, seed=4):
        problem = build_problem(task_id)
        assert isinstance(problem, DeskProblem)
        order, policy = (problem.orders or (None,))[0], problem.desk.policy
        has_fee = problem.answer.isdigit() and order is not None and order.tier == policy.fee_tier
        value = score_episode(task_id, clerk_turns(task_id, always)).value
        assert value == float(not has_fee)
        rewards.add(value)
    assert rewards == {0.0, 1.0}


def test_slips_cost_a_little(clerk_turns: Callable[..., list[Turn]]) -> None:
    slips = Shortcuts(slip=1.0)
    for family in ("calc", "compare", "sums", "gcd"):
        assert rate(family, "train", clerk_turns, slips) < 0.5


def test_the_record_a_client_made_up_cannot_raise_the_reward(
    turns_of: Callable[[Sequence[Say]], list[Turn]], calling: Callable[..., Say]
) -> None:
    """The client told the model that the order is pending; in the world it is not."""
    task_id = find("cancel", lambda p: p.answer == "not allowed" and p.desk.policy.cancel)
    (order_id,) = build_problem(task_id).ids
    believed = [
        calling("get_order", order_id=order_id),
        calling("cancel_order", order_id=order_id),
        Say(thought="x", content=f"Order {order_id} is cancelled."),
    ]
    reward = score_episode(task_id, turns_of(believed))
    assert reward.value == 0.0
    assert reward.components["state"] == 0.0
    assert "cancelled" in reward.evidence


def test_the_answer_alone_is_not_enough_when_nothing_was_done(
    turns_of: Callable[[Sequence[Say]], list[Turn]],
) -> None:
    task_id = find("cancel", lambda p: p.answer == "cancelled")
    (order_id,) = build_problem(task_id).ids
    said = [Say(thought="x", content=f"Order {order_id} is cancelled.")]
    reward = score_episode(task_id, turns_of(said))
    assert reward.value == 0.0
    assert reward.components == {"state": 0.0, "answer": 1.0, "looked_up": 0.0, "format": 1.0}


def test_a_change_beyond_the_request_costs_the_reward(
    clerk_turns: Callable[..., list[Turn]],
    turns_of: Callable[[Sequence[Say]], list[Turn]],
    calling: Callable[..., Say],
) -> None:
    task_id = find("lookup", lambda p: p.orders and p.orders[0].status == "pending")
    (order_id,) = build_problem(task_id).ids
    extra = turns_of([calling("cancel_order", order_id=order_id)])
    first, *rest = clerk_turns(task_id)
    reward = score_episode(task_id, [first, *extra, *rest])
    assert reward.components["state"] == 0.0
    assert reward.value == 0.0


@pytest.mark.parametrize(
    "change",
    [
        {"is_well_formed": False},
        {"reasoning": None},
        {"stop": StopCause.LENGTH},
        {"stop": StopCause.STOP_STRING},
    ],
)
def test_a_malformed_last_turn_earns_nothing(
    change: dict[str, Any], clerk_turns: Callable[..., list[Turn]]
) -> None:
    *before, last = clerk_turns("lookup/train/1")
    reward = score_episode("lookup/train/1", [*before, replace(last, **change)])
    assert reward.value == 0.0
    assert reward.components["format"] == 0.0


@pytest.mark.parametrize("arguments", ["", "{", "[]", "3", '"x"', "null", "[" * 5000, '{"a": 1'])
@pytest.mark.parametrize("name", ["get_order", "no_such_tool", "x" * 2000])
def test_broken_arguments_earn_nothing_and_crash_nothing(
    arguments: str, name: str, clerk_turns: Callable[..., list[Turn]]
) -> None:
    first, *rest = clerk_turns("lookup/train/1")
    broken = replace(first, tool_calls=(ToolCall(name=name, arguments=arguments),))
    reward = score_episode("lookup/train/1", [broken, *rest])
    assert reward.value == 0.0
    assert reward.status is RewardStatus.OK


@pytest.mark.parametrize(
    "arguments",
    [
        "{}",
        '{"order_id": null}',
        '{"order_id": ["1"]}',
        '{"order_id": {"a": 1}}',
        '{"amount": 1e9}',
    ],
)
def test_odd_but_valid_arguments_crash_nothing(
    arguments: str, clerk_turns: Callable[..., list[Turn]]
) -> None:
    for family, name in (
        ("refund", "refund_order"),
        ("calc", "calculator"),
        ("lookup", "get_order"),
    ):
        task_id = f"{family}/train/1"
        *_, last = clerk_turns(task_id)
        odd = replace(last, content="", tool_calls=(ToolCall(name=name, arguments=arguments),))
        assert score_episode(task_id, [odd, last]).value in (0.0, 1.0)


def test_a_tool_call_in_the_last_turn_is_no_answer(clerk_turns: Callable[..., list[Turn]]) -> None:
    turns = clerk_turns("lookup/train/1")
    reward = score_episode("lookup/train/1", turns[:1])
    assert reward.value == 0.0
    assert "the last turn still calls tools" in reward.evidence


def test_too_many_turns_earn_nothing(clerk_turns: Callable[..., list[Turn]]) -> None:
    first, *rest = clerk_turns("lookup/train/1")
    assert score_episode("lookup/train/1", [first] * 6 + rest).value == 0.0


@pytest.mark.parametrize("stop", [StopCause.ABORT, StopCause.ERROR])
def test_a_turn_that_the_infrastructure_cut_cannot_be_scored(
    stop: StopCause, clerk_turns: Callable[..., list[Turn]]
) -> None:
    turns = [replace(clerk_turns("lookup/train/1")[0], stop=stop)]
    reward = score_episode("lookup/train/1", turns)
    assert reward.value is None
    assert reward.status is RewardStatus.UNCOMPUTABLE


def test_nothing_said_cannot_be_scored() -> None:
    assert score_episode("lookup/train/1", []).value is None


@pytest.mark.parametrize(
    ("content", "is_right"),
    [
        ("Order 4217 is shipped.", True),
        ("It is shipped", True),
        ("Order 4217 is pending or shipped.", False),
        ("Order 4217 is shipped, price 31.", False),
        ("It is not allowed to say shipped.", False),
        ("", False),
    ],
)
def test_a_fact_must_be_stated_without_a_rival(content: str, is_right: bool) -> None:
    assert states(content, "shipped", ("4217",), "lookup") is is_right


@pytest.mark.parametrize(
    ("content", "is_right"),
    [
        ("Order 4217 has the higher price.", True),
        ("Order 4217, not 5310.", False),
        ("Order 5310 has the higher price.", False),
    ],
)
def test_a_comparison_names_one_order(content: str, is_right: bool) -> None:
    assert states(content, "4217", ("4217", "5310"), "compare") is is_right


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("\\boxed{%s}", 1.0),
        ("The answer is \\boxed{ %s }.", 1.0),
        ("%s", 0.0),
        ("\\boxed{%s} \\boxed{%s}", 0.0),
        ("\\boxed{1%s}", 0.0),
    ],
)
def test_reasoning_gym_scores_what_is_in_the_only_box(
    content: str, value: Any, turns_of: Callable[[Sequence[Say]], list[Turn]]
) -> None:
    answer = build_problem("gcd/train/5").entry["answer"]
    said = turns_of([Say(thought="x", content=content.replace("%s", answer))])
    assert score_episode("gcd/train/5", said).value == value


def test_reasoning_gym_itself_gives_the_score(
    turns_of: Callable[[Sequence[Say]], list[Turn]],
) -> None:
    """Its scorer pays a substring in part; the part is kept beside the reward."""
    task_id = find("aiw", lambda p: len(p.entry["answer"]) == 1)
    answer = build_problem(task_id).entry["answer"]
    said = turns_of([Say(thought="x", content=f"\\boxed{{1{answer}}}")])
    reward = score_episode(task_id, said)
    assert reward.components["reasoning_gym"] == 0.5
    assert reward.value == 0.0
    assert make_task(task_id).tools == ()


def test_a_turn_is_needed_only_in_its_public_face(clerk_turns: Callable[..., list[Turn]]) -> None:
    turns: list[Turn] = clerk_turns("calc/report/1")
    renamed = [replace(t, turn_id="other", num_tokens=99, text="x") for t in turns]
    assert score_episode("calc/report/1", renamed) == score_episode("calc/report/1", turns)
