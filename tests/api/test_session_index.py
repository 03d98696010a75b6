"""Where a request belongs when its client names no session: joined, begun, or ambiguous."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from m1serve.api.lookalikes import Asker, Placement
from m1serve.api.session_index import Question, SessionIndex
from m1serve.chat.chain import chain_of
from m1serve.chat.messages import ChatMessage
from m1serve.store.records import SessionSource
from m1serve.types import ToolCall


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def says(text: str, **more: Any) -> ChatMessage:
    return ChatMessage(role="assistant", content=text, **more)


def calls(*ids: str, arguments: str = "{}") -> ChatMessage:
    made = tuple(ToolCall(name="look", arguments=arguments, id=name) for name in ids)
    return ChatMessage(role="assistant", content="", tool_calls=made)


@dataclass
class World:
    """An index, its clock, and clients that answer at once."""

    now: float = 0.0
    index: SessionIndex = field(init=False)

    def __post_init__(self) -> None:
        self.index = SessionIndex(idle_s=600, clock=lambda: self.now)

    def asked(self, *messages: ChatMessage, session: str | None = None, **more: Any) -> Placement:
        key, retry = more.pop("key", "key"), more.pop("retry", 0)
        chain = chain_of("tenant", "m1", messages, [])
        asker = Asker(tenant_id="tenant", key_id=key, request_hash=chain.keys[-1].hex(), hints=more)
        question = Question(
            asker=asker, session_id=session, retry_count=retry, messages=messages, chain=chain
        )
        placement = self.index.find(question)
        self.index.enter(placement)
        return placement

    def answered(
        self, *messages: ChatMessage, session: str | None = None, **more: Any
    ) -> Placement:
        """The last message is the answer."""
        placement = self.asked(*messages[:-1], session=session, **more)
        chain = chain_of("tenant", "m1", messages[:-1], [])
        self.index.answered(placement, messages[-1], chain)
        self.index.settle(placement, was_delivered=True)
        return placement


@pytest.fixture
def world() -> World:
    return World()


HI = user("Hi")


def test_what_goes_on_with_one_conversation_joins_it(world: World) -> None:
    first = world.answered(HI, says("Hello"))
    second = world.answered(HI, says("Hello"), user("More"), says("Yes"))
    third = world.asked(HI, says("Hello"), user("More"), says("Yes"), user("Bye"))
    assert first.source is SessionSource.NEW
    assert {second.source, third.source} == {SessionSource.INFERRED}
    assert {second.session_id, third.session_id} == {first.session_id}


def test_a_history_nobody_had_begins_a_session(world: World) -> None:
    first = world.answered(HI, says("Hello"))
    second = world.asked(HI, says("Good day"), user("More"))
    assert second.source is SessionSource.NEW
    assert second.session_id != first.session_id


def test_lookalikes_are_ambiguous_and_their_followers_stay_with_them(world: World) -> None:
    parents = {world.answered(HI, says("Hello")).session_id for _ in range(2)}
    lost = world.answered(HI, says("Hello"), user("More"), says("Yes"))
    assert lost.source is SessionSource.AMBIGUOUS
    assert lost.session_id not in parents
    after = world.asked(HI, says("Hello"), user("More"), says("Yes"), user("Bye"))
    assert (after.source, after.session_id) == (SessionSource.INFERRED, lost.session_id)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({"user": "a"}, {"user": "b"}, id="the user"),
        pytest.param({"task": "a"}, {"task": "b"}, id="the task"),
        pytest.param({"group": "a"}, {"group": "b"}, id="the group"),
        pytest.param({"key": "a"}, {"key": "b"}, id="the key"),
    ],
)
def test_what_the_client_says_of_itself_tells_apart(
    world: World, one: dict[str, str], other: dict[str, str]
) -> None:
    first = world.answered(HI, says("Hello"), **one)
    second = world.answered(HI, says("Hello"), **other)
    follower = (HI, says("Hello"), user("More"))
    assert world.asked(*follower, **other).session_id == second.session_id
    assert world.asked(*follower, **one).session_id == first.session_id


def test_a_turn_of_another_task_never_goes_on(world: World) -> None:
    world.answered(HI, says("Hello"), task="a")
    assert world.asked(HI, says("Hello"), user("More"), task="b").source is SessionSource.NEW


def test_call_ids_and_reasoning_tell_apart(world: World) -> None:
    found = ChatMessage(role="tool", content="ok", name="look")
    sessions = [world.answered(HI, calls(name)).session_id for name in ("c1", "c2")]
    assert world.asked(HI, calls("c1"), found).session_id == sessions[0]
    assert world.asked(HI, calls("c2"), found).session_id == sessions[1]
    thought = [world.answered(user("X"), says("Y", reasoning=r)).session_id for r in "ab"]
    assert world.asked(user("X"), says("Y", reasoning="b"), HI).session_id == thought[1]
    assert world.asked(user("X"), says("Y", reasoning="a"), HI).session_id == thought[0]


def test_an_answer_that_was_gone_on_with_gives_way_to_one_that_was_not(world: World) -> None:
    first = world.answered(HI, says("Hello"))
    assert world.answered(HI, says("Hello"), user("A"), says("1")).session_id == first.session_id
    second = world.answered(HI, says("Hello"))
    assert world.asked(HI, says("Hello"), user("B")).session_id == second.session_id


def test_a_request_whose_answer_was_lost_takes_nobodys_place(world: World) -> None:
    first = world.answered(HI, says("Hello"))
    lost = world.asked(HI, says("Hello"), user("A"))
    world.index.settle(lost, was_delivered=False)
    world.answered(HI, says("Hello"))
    again = world.asked(HI, says("Hello"), user("A"))
    assert lost.session_id == first.session_id
    assert again.source is SessionSource.AMBIGUOUS


@pytest.mark.parametrize("how", ["ended", "idle"])
def test_conversations_that_are_over_give_way_to_those_that_run(world: World, how: str) -> None:
    old = world.answered(HI, says("Hello"))
    if how == "ended":
        world.index.end("tenant", old.session_id)
    else:
        world.now += 601
    running = world.answered(HI, says("Hello"))
    assert world.asked(HI, says("Hello"), user("More")).session_id == running.session_id


def test_a_conversation_may_go_on_after_a_long_pause(world: World) -> None:
    first = world.answered(HI, says("Hello"))
    world.now += 86_400
    assert world.asked(HI, says("Hello"), user("More")).session_id == first.session_id


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_declared_retry_is_beside_the_attempt_that_failed(world: World, is_settled: bool) -> None:
    for _ in range(3):
        world.answered(HI, says("Hello"))
    failed = world.asked(HI)
    if is_settled:
        world.index.settle(failed, was_delivered=False)
    retry = world.asked(HI, retry=1)
    assert (retry.source, retry.session_id) == (SessionSource.RETRY, failed.session_id)


def test_a_first_request_that_several_may_have_repeated_begins_a_session(world: World) -> None:
    for _ in range(2):
        world.index.settle(world.asked(HI), was_delivered=False)
    assert world.asked(HI, retry=1).source is SessionSource.NEW


def test_a_first_request_is_no_retry_of_what_somebody_went_on_with(world: World) -> None:
    """Its own first attempt may never have come here."""
    other = world.answered(HI, says("Hello"))
    world.answered(HI, says("Hello"), user("More"), says("Fine"))
    retry = world.asked(HI, retry=1)
    assert retry.source is SessionSource.NEW
    assert retry.session_id != other.session_id


def test_an_attempt_is_repeated_once(world: World) -> None:
    failed = [world.asked(HI) for _ in range(1)]
    world.index.settle(failed[0], was_delivered=False)
    first = world.asked(HI, retry=1)
    world.index.settle(first, was_delivered=False)
    second = world.asked(HI, retry=2)
    assert {first.session_id, second.session_id} == {failed[0].session_id}


def test_a_retry_of_a_later_turn_stays_in_its_session(world: World) -> None:
    first = world.answered(HI, says("Hello"))
    failed = world.asked(HI, says("Hello"), user("More"))
    world.index.settle(failed, was_delivered=False)
    for retry in (0, 1):
        placed = world.asked(HI, says("Hello"), user("More"), retry=retry)
        assert placed.session_id == first.session_id


@pytest.mark.parametrize(
    ("answer", "replayed"),
    [
        pytest.param(calls("c1", "c2"), calls("c1"), id="one of two calls"),
        pytest.param(calls("c1", "c2"), calls("x"), id="one of two calls, renamed"),
        pytest.param(says(" Hello\n"), says("Hello"), id="trimmed"),
        pytest.param(says("A", reasoning="r"), says("B", reasoning="r"), id="same reasoning"),
    ],
)
def test_an_answer_is_known_in_another_form(
    world: World, answer: ChatMessage, replayed: ChatMessage
) -> None:
    first = world.answered(HI, answer)
    second = world.asked(HI, replayed, user("More"))
    assert (second.source, second.session_id) == (SessionSource.INFERRED, first.session_id)


def test_a_shortened_answer_that_looks_like_anothers_is_ambiguous(world: World) -> None:
    world.answered(HI, calls("", ""))
    world.answered(HI, calls(""))
    assert world.asked(HI, calls(""), user("More")).source is SessionSource.AMBIGUOUS


def test_a_turn_we_never_answered_in_between_breaks_no_session(world: World) -> None:
    first = world.answered(HI, says("Hello"))
    others = (user("More"), says("from another server"), user("Bye"))
    assert world.asked(HI, says("Hello"), *others).session_id == first.session_id


def test_a_named_session_is_what_the_client_says(world: World) -> None:
    world.answered(HI, says("Hello"))
    named = world.answered(HI, says("Hello"), user("More"), says("Yes"), session="mine")
    assert (named.source, named.session_id) == (SessionSource.NAMED, "mine")
    after = world.asked(HI, says("Hello"), user("More"), says("Yes"), user("Bye"))
    assert after.session_id == "mine"


def test_choices_with_one_text_are_one_session(world: World) -> None:
    placement = world.asked(HI)
    for _ in range(2):
        world.index.answered(placement, says("Hello"), chain_of("tenant", "m1", [HI], []))
    world.index.settle(placement, was_delivered=True)
    assert world.asked(HI, says("Hello"), user("More")).session_id == placement.session_id


def test_the_oldest_are_forgotten_whole() -> None:
    world = World()
    world.index = SessionIndex(idle_s=600, max_requests=10, clock=lambda: world.now)
    history = [HI]
    for number in range(50):
        history += [says(f"answer {number}"), user("More")]
        world.answered(*history[:-1])
    assert len(world.index) == 10
    tables = (world.index._by_chain, world.index._by_prompt, world.index._by_request)
    assert [sum(map(len, table.values())) for table in tables] == [10, 10, 10]


def test_an_answer_to_a_forgotten_request_is_not_kept() -> None:
    world = World()
    world.index = SessionIndex(idle_s=600, max_requests=2, clock=lambda: world.now)
    slow = world.asked(HI)
    for number in range(3):
        world.answered(user(str(number)), says("ok"))
    world.index.answered(slow, says("late"), chain_of("tenant", "m1", [HI], []))
    assert len(world.index._by_chain) == len(world.index._by_prompt) == 2


def test_forgotten_texts_leave_nothing() -> None:
    world = World()
    world.index = SessionIndex(idle_s=600, max_requests=5, clock=lambda: world.now)
    ids: list[int] = [1]
    for number in range(30):
        asker = Asker(tenant_id="t", key_id="k", request_hash=str(number), hints={})
        chain = chain_of("t", "m1", (), ())
        placement = world.index.find(
            Question(
                asker=asker,
                session_id=None,
                retry_count=0,
                messages=(),
                chain=chain,
                model="m1",
                prompt_ids=ids,
            )
        )
        world.index.enter(placement)
        world.index.completed(placement, [2, 3])
        world.index.settle(placement, was_delivered=True)
        ids = [*ids, 2, 3, number]
    assert placement.source is SessionSource.INFERRED
    assert len(world.index._by_tokens) == 5
    assert sum(len(c) for c in world.index._by_tokens._lengths.values()) == 5
