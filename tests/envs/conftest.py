"""Builders of turns as a scorer gets them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

import pytest

from m1serve.envs.base import build_problem
from m1serve.envs.clerk import play
from m1serve.envs.saying import CAREFUL, Call, Say, Shortcuts
from m1serve.types import StopCause, ToolCall, Turn

TurnsOf = Callable[[Sequence[Say]], list[Turn]]


def _turn(say: Say) -> Turn:
    calls = tuple(ToolCall(name=c.name, arguments=json.dumps(dict(c.arguments))) for c in say.calls)
    return Turn(
        turn_id="t",
        text="",
        reasoning=say.thought,
        content=say.content,
        tool_calls=calls,
        is_well_formed=True,
        stop=StopCause.EOS,
        num_tokens=1,
    )


@pytest.fixture
def turns_of() -> TurnsOf:
    return lambda said: [_turn(say) for say in said]


@pytest.fixture
def clerk_turns() -> Callable[..., list[Turn]]:
    """What the clerk says to a task, as turns."""

    def make(task_id: str, shortcuts: Shortcuts = CAREFUL, seed: int = 0) -> list[Turn]:
        played = play(build_problem(task_id), random.Random(f"{seed}/{task_id}"), shortcuts)
        return [_turn(say) for say in played.said]

    return make


@pytest.fixture
def calling() -> Callable[..., Say]:
    def make(name: str, **arguments: object) -> Say:
        return Say(thought="x", calls=(Call(name=name, arguments=arguments),))

    return make
