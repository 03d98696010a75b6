"""Drift classes of real prompts: what clients do to a history, through API and ledger."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import Settings
from m1serve.store import Store
from m1serve.store.records import JournalEntry
from m1serve.types import Drift

NANO = ChatTokenizer.load(Settings().model_dir)
SYSTEM: Any = {"role": "system", "content": "You are a retail agent. Be brief and polite."}
REPLIES = ["<think>\nfirst\n</think>\nHello, who is there?", "<think>\nb\n</think>\nGood.", "x"]


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def said(text: str) -> Any:
    return {"role": "assistant", "content": text}


HELLO = said("Hello, who is there?")
FIRST = [SYSTEM, user("Hi, I need help.")]
FOLLOW_UPS: list[Any] = [
    pytest.param([*FIRST, HELLO, user("Me.")], Drift.EXTEND, Drift.REWRITE_LAST, id="as it was"),
    pytest.param(
        [*FIRST, said("Hello!"), user("Me.")],
        Drift.REWRITE_LAST,
        Drift.REWRITE_LAST,
        id="the answer was changed",
    ),
    pytest.param(
        # the prompt ended with the header of an answer, which is gone too
        [*FIRST, user("Me.")],
        Drift.EDIT,
        Drift.EDIT,
        id="the answer was dropped",
    ),
    pytest.param(
        [SYSTEM, user("Hi, I want help."), HELLO, user("Me.")],
        Drift.EDIT,
        Drift.EDIT,
        id="what was asked was changed",
    ),
    pytest.param(
        [{**SYSTEM, "content": "Summarise: " + "they talked. " * 30}, user("Do it.")],
        Drift.SIDE,
        Drift.SIDE,
        id="something else altogether",
    ),
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path / 'store.db'}")
    yield opened
    opened.close()


async def drifts(world: Any, store: Store, *requests: Any) -> list[str]:
    """Of the turns in order, all in one named session."""
    for messages in requests:
        await world.client.chat.completions.create(
            model="fake", messages=messages, extra_headers={"x-m1-session-id": "s"}
        )
    entries = [JournalEntry(writer="w", seq=i, record=r) for i, r in enumerate(world.journal)]
    store.ledger.ingest(entries)
    for turn in world.turns:
        [request] = [r for r in world.engine.requests if r.id == turn.request_id]
        stored = store.ledger.turn(turn.turn_id)
        assert stored.prompt_ids == request.prompt_ids
        assert stored.completion_ids == turn.completion_ids
    report = store.ledger.session_report("default", "s")
    assert report is not None
    return [turn.drift for turn in report.turns]


@pytest.mark.parametrize("history", ["exact", "template"])
@pytest.mark.parametrize(("messages", "exact", "template"), FOLLOW_UPS)
async def test_the_second_turn_is_named_for_what_became_of_the_first(
    serve: Any, store: Store, history: str, messages: Any, exact: Drift, template: Drift
) -> None:
    """Under `template` past thinking is dropped, so that a faithful history rewrites it too."""
    async with serve(*REPLIES, tok=NANO, model={"model_id": "fake", "history": history}) as world:
        found = await drifts(world, store, FIRST, messages)
    assert found == [Drift.ROOT, exact if history == "exact" else template]


@pytest.mark.parametrize("history", ["exact", "template"])
async def test_an_answer_without_thinking_is_extended_under_both_rules(
    serve: Any, store: Store, history: str
) -> None:
    plain = ["Hello, who is there?", "Good."]
    async with serve(*plain, tok=NANO, model={"model_id": "fake", "history": history}) as world:
        found = await drifts(world, store, FIRST, [*FIRST, HELLO, user("Me.")])
    assert found == [Drift.ROOT, Drift.EXTEND]


@pytest.mark.parametrize("history", ["exact", "template"])
async def test_a_second_way_on_is_a_fork(serve: Any, store: Store, history: str) -> None:
    async with serve(*REPLIES, tok=NANO, model={"model_id": "fake", "history": history}) as world:
        follow_ups = [[*FIRST, HELLO, user(text)] for text in ("Me.", "You.")]
        found = await drifts(world, store, FIRST, *follow_ups)
    expected = Drift.EXTEND if history == "exact" else Drift.REWRITE_LAST
    assert found == [Drift.ROOT, expected, Drift.FORK]
