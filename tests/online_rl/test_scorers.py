"""Which scorer judges what, and what the scorers say."""

from __future__ import annotations

import time

import pytest

from m1serve.envs import FAMILIES, task_ids
from m1serve.envs.base import build_problem
from m1serve.envs.maths import SumProblem
from m1serve.errors import RewardError
from m1serve.online_rl.scorers.base import (
    reward_from_json,
    reward_to_json,
    turn_from_json,
    turn_to_json,
)
from m1serve.online_rl.scorers.boxed import is_equal
from m1serve.online_rl.scorers.compose import choose
from m1serve.online_rl.scorers.format import format_faults
from m1serve.online_rl.scorers.sandbox import Sandbox
from m1serve.types import Reward, RewardStatus, StopCause, ToolCall, Turn


def turn(content: str, **changes: object) -> Turn:
    fields: dict[str, object] = {
        "turn_id": "t",
        "text": f"<think>\nhm\n</think>\n{content}",
        "reasoning": "hm",
        "content": content,
        "tool_calls": (),
        "is_well_formed": True,
        "stop": StopCause.EOS,
        "num_tokens": 9,
    }
    return Turn(**(fields | changes))  # type: ignore[arg-type]


def sum_task() -> tuple[str, str]:
    task_id = task_ids("train", "sums", 1)[0]
    problem = build_problem(task_id)
    assert isinstance(problem, SumProblem)
    return task_id, problem.answer


@pytest.mark.parametrize(
    ("said", "is_right"),
    [
        ("68", True),
        ("68.0", True),
        ("\\text{68}", True),
        ("$68$", True),
        ("1,068", False),
        ("23+45", False),
        ("-68", False),
        ("6 8", False),
        ("sixty-eight", False),
        ("", False),
    ],
)
def test_a_box_must_hold_the_number_itself(said: str, is_right: bool) -> None:
    assert is_equal(said, "68") is is_right


def test_sums_need_the_answer_and_the_form() -> None:
    task_id, answer = sum_task()
    right = f"It is \\boxed{{{answer}}}."
    scorer = choose(task_id)
    assert scorer.name == "boxed"
    assert scorer.score([turn(right)], task_id).value == 1.0
    assert scorer.score([turn(right, reasoning=None)], task_id).components == {
        "answer": 1.0,
        "format": 0.0,
    }
    assert scorer.score([turn(right, reasoning=None)], task_id).value == 0.0
    assert scorer.score([turn(f"It is {answer}.")], task_id).value == 0.0
    assert scorer.score([turn("It is \\boxed{100000}.")], task_id).value == 0.0


def test_every_family_has_a_scorer_and_nothing_else_has() -> None:
    for family in FAMILIES:
        task_id = task_ids("gate", family, 1)[0]
        reward = choose(task_id).score([turn("I do not know.")], task_id)
        assert reward.value == 0.0, family
    with pytest.raises(RewardError, match="no scorer for task 'mystery/1'"):
        choose("mystery/1")


def test_format_faults_are_named() -> None:
    call = ToolCall(name="get_order", arguments="{}")
    assert format_faults([turn("ok")]) == []
    assert format_faults([]) == ["no turn"]
    assert len(format_faults([turn("x", is_well_formed=False), turn("y")])) == 1
    assert format_faults([turn("x", stop=StopCause.LENGTH)]) == ["turn 1 stopped by length"]
    assert format_faults([turn("", tool_calls=(call,))]) == ["the last turn still calls tools"]


def test_turns_and_rewards_survive_the_pipe() -> None:
    call = ToolCall(name="get_order", arguments='{"order_id": "1"}', id="c1")
    for before in (turn("é"), turn("", tool_calls=(call,), reasoning=None)):
        assert turn_from_json(turn_to_json(before)) == before
    reward = Reward(value=None, status=RewardStatus.TIMEOUT, components={"a": 0.5}, evidence="é")
    assert reward_from_json(reward_to_json(reward)) == reward


def test_the_real_sandbox_scores_hundreds_in_seconds() -> None:
    task_id, answer = sum_task()
    others = [i for f in ("lookup", "refund") for i in task_ids("train", f, 100)]
    with Sandbox(timeout_s=20.0, memory_bytes=2**31) as sandbox:
        right = sandbox.score([turn(f"\\boxed{{{answer}}}")], task_id)
        assert (right.scorer, right.reward.value) == ("boxed", 1.0)
        unknown = sandbox.score([turn("x")], "mystery/1").reward
        assert unknown.status is RewardStatus.UNCOMPUTABLE
        begin = time.monotonic()
        rewards = [sandbox.score([turn("not allowed")], t).reward for t in others]
        assert time.monotonic() - begin < 5.0
        assert sandbox.num_starts == 1
    assert all(r.value is not None for r in rewards)
