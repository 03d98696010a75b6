"""How turns of a session hang together, decided on token prefixes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m1serve.store.captured import capture
from m1serve.store.drift import TurnFacts, find_superseded, link_turn
from m1serve.store.records import TurnRecord
from m1serve.store.trajectories import NOT_DELIVERED, Segment, assemble, why_not_trainable
from m1serve.types import Drift, Mode, Sampling, StopCause

SECRET = b"secret"
SYSTEM = tuple(range(100, 130))


def link_all(turns: Sequence[TurnRecord]) -> list[TurnFacts]:
    """In order of arrival, superseded ones marked: what ingest does."""
    captured = [capture("w", i, turn, SECRET) for i, turn in enumerate(turns)]
    prompts = {c.record.turn_id: c.prompt for c in captured}
    linked: list[TurnFacts] = []
    for one in sorted(captured, key=lambda c: c.facts.order):
        link = link_turn(
            one.facts, one.prompt, linked, secret=SECRET, prompt_of=prompts.__getitem__
        )
        linked.append(dataclasses.replace(one.facts, **dataclasses.asdict(link)))
    superseded = find_superseded(linked)
    return [dataclasses.replace(t, superseded_by=superseded.get(t.request_id)) for t in linked]


def segments(turns: Sequence[TurnRecord]) -> list[list[str]]:
    return [[t.turn_id for t in s.turns] for s in assemble(link_all(turns), set())]


FIRST = (*SYSTEM, 1)
REPLY = (50, 51, 52)
TABLE = [
    pytest.param((*FIRST, *REPLY, 2), Drift.EXTEND, 34, id="exactly what was sampled, and more"),
    pytest.param((*FIRST, *REPLY), Drift.EXTEND, 34, id="nothing new but to go on"),
    pytest.param((*FIRST, 50, 51, 2), Drift.REWRITE_LAST, 31, id="the reply was cut"),
    pytest.param((*FIRST, 50, 99, 52, 2), Drift.REWRITE_LAST, 31, id="the reply was changed"),
    pytest.param((*FIRST, 2), Drift.REWRITE_LAST, 31, id="the reply was left out"),
    pytest.param((*SYSTEM, 9, *REPLY, 2), Drift.EDIT, 30, id="the history was changed"),
    pytest.param(SYSTEM, Drift.EDIT, 30, id="the history was cut"),
    pytest.param((7, 8, 9), Drift.SIDE, 0, id="nothing in common"),
    pytest.param((*SYSTEM[:8], *range(300, 400)), Drift.SIDE, 8, id="only the template's header"),
]


@pytest.mark.parametrize(("prompt", "drift", "shared"), TABLE)
def test_the_second_turn_is_named_for_what_the_client_did(
    recorder: Any, prompt: tuple[int, ...], drift: Drift, shared: int
) -> None:
    first = recorder.turn(FIRST, REPLY)
    second = recorder.turn(prompt, (60,))
    one, two = link_all([first, second])
    assert (one.drift, one.parent_turn_id) == (Drift.ROOT, None)
    assert (two.drift, two.shared_tokens) == (drift, shared)
    assert two.parent_turn_id == (None if drift is Drift.SIDE else first.turn_id)


def test_the_longest_prefix_is_the_parent(recorder: Any) -> None:
    one = recorder.turn((1, 2), (3,))
    two = recorder.turn((1, 2, 3, 4), (5,))
    three = recorder.turn((1, 2, 3, 4, 5, 6), (7,))
    assert link_all([one, two, three])[2].parent_turn_id == two.turn_id


def test_a_second_continuation_of_one_turn_is_a_fork(recorder: Any) -> None:
    root = recorder.turn((1, 2), (3,))
    left = recorder.turn((1, 2, 3, 4), (5,))
    right = recorder.turn((1, 2, 3, 9), (5,))
    facts = link_all([root, left, right])
    assert [f.drift for f in facts] == [Drift.ROOT, Drift.EXTEND, Drift.FORK]
    chains = assemble(facts, set())
    assert [[t.turn_id for t in s.turns] for s in chains] == [
        [root.turn_id, left.turn_id],
        [right.turn_id],
    ]
    assert [t.turn_id for t in chains[1].context] == [root.turn_id]


def test_turns_of_another_model_are_no_parents(recorder: Any) -> None:
    one = recorder.turn((1, 2), (3,))
    other = recorder.turn((1, 2, 3, 4), (5,), model_id="other")
    assert link_all([one, other])[1].drift is Drift.ROOT


@pytest.mark.parametrize("prompt", [(*FIRST, *REPLY, 2), FIRST, (*FIRST, 2), (*SYSTEM, 9)])
def test_turns_of_another_task_are_no_parents(recorder: Any, prompt: tuple[int, ...]) -> None:
    turns = [
        recorder.turn(FIRST, REPLY, task_id="sums/train/1"),
        recorder.turn(prompt, (60,), task_id="sums/train/2"),
    ]
    chains = assemble(link_all(turns), set())
    assert [(s.task_id, len(s.turns), s.context) for s in chains] == [
        ("sums/train/1", 1, ()),
        ("sums/train/2", 1, ()),
    ]
    assert [s.head.drift for s in chains] == [Drift.ROOT, Drift.ROOT]


def test_a_turn_that_names_no_task_goes_on_with_its_parents(recorder: Any) -> None:
    turns = [
        recorder.turn(FIRST, REPLY, task_id="sums/train/1"),
        recorder.turn((*FIRST, *REPLY, 2), (60,), task_id=None),
    ]
    (chain,) = assemble(link_all(turns), set())
    assert (chain.task_id, len(chain.turns)) == ("sums/train/1", 2)


def test_an_undelivered_answer_is_superseded_by_its_retry(recorder: Any) -> None:
    lost = recorder.turn((1, 2), (3,), request_hash="same", was_delivered=False)
    seen = recorder.turn((1, 2), (4,), request_hash="same", retry_count=1)
    one, two = link_all([lost, seen])
    assert (one.superseded_by, two.superseded_by) == (seen.request_id, None)
    assert two.drift is Drift.ROOT
    assert segments([lost, seen]) == [[seen.turn_id]]


def test_a_retry_the_client_gave_up_on_is_superseded_by_what_it_saw(recorder: Any) -> None:
    seen = recorder.turn((1, 2), (3,), request_hash="same")
    lost = recorder.turn((1, 2), (4,), request_hash="same", was_delivered=False)
    assert [f.superseded_by for f in link_all([seen, lost])] == [None, seen.request_id]


def test_of_two_delivered_answers_the_declared_retry_counts(recorder: Any) -> None:
    first = recorder.turn((1, 2), (3,), request_hash="same")
    retry = recorder.turn((1, 2), (4,), request_hash="same", retry_count=1)
    assert [f.superseded_by for f in link_all([first, retry])] == [retry.request_id, None]


def test_an_answer_that_a_later_prompt_builds_on_was_seen(recorder: Any) -> None:
    used = recorder.turn((1, 2), (3,), request_hash="same", was_delivered=False)
    retry = recorder.turn((1, 2), (4,), request_hash="same", was_delivered=False)
    following = recorder.turn((1, 2, 3, 9), (5,))
    facts = link_all([used, retry, following])
    assert [f.superseded_by for f in facts] == [None, used.request_id, None]
    assert segments([used, retry, following]) == [[used.turn_id, following.turn_id]]


def test_a_retry_in_the_middle_continues_the_chain(recorder: Any) -> None:
    root = recorder.turn((1,), (2,))
    lost = recorder.turn((1, 2, 3), (4,), request_hash="same", was_delivered=False)
    retry = recorder.turn((1, 2, 3), (5,), request_hash="same", retry_count=1)
    last = recorder.turn((1, 2, 3, 5, 6), (7,))
    facts = link_all([root, lost, retry, last])
    assert [f.drift for f in facts] == [Drift.ROOT, *[Drift.EXTEND] * 3]
    assert segments([root, lost, retry, last]) == [[root.turn_id, retry.turn_id, last.turn_id]]


def test_asking_the_same_twice_on_purpose_gives_two_trajectories(recorder: Any) -> None:
    one = recorder.turn((1, 2), (3,), request_hash="same")
    two = recorder.turn((1, 2), (4,), request_hash="same")
    assert segments([one, two]) == [[one.turn_id], [two.turn_id]]


def test_each_choice_is_its_own_leaf_and_their_request_the_group(recorder: Any) -> None:
    choices = [
        recorder.turn((1, 2), (3 + i,), request_id="r", choice=i, num_choices=3, created_at=5.0)
        for i in range(3)
    ]
    facts = link_all(choices)
    assert {f.drift for f in facts} == {Drift.ROOT}
    chains = assemble(facts, set())
    assert len(chains) == 3
    assert {s.group_key for s in chains} == {"request:r"}


def test_the_choice_that_was_built_upon_carries_the_chain(recorder: Any) -> None:
    root = recorder.turn((1,), (2,))
    choices = [
        recorder.turn((1, 2, 3), (4 + i,), request_id="r", choice=i, num_choices=2, created_at=2e6)
        for i in range(2)
    ]
    last = recorder.turn((1, 2, 3, 5, 6), (7,), created_at=3e6)
    assert sorted(segments([root, *choices, last]), key=len) == [
        [choices[0].turn_id],
        [root.turn_id, choices[1].turn_id, last.turn_id],
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mode": Mode.EVAL}, "mode: eval"),
        ({"consent": False}, "consent: withheld"),
        ({"stop": StopCause.ABORT}, "stop: abort"),
        ({"stop": StopCause.ERROR}, "stop: error"),
        ({"was_delivered": False}, NOT_DELIVERED),
        ({"sampling": Sampling(temperature=0.0)}, "sampling: no trainable token"),
        ({"token_flags": (2, 5)}, "sampling: no trainable token"),
        ({"sampling": Sampling(top_p=0.95)}, ""),
        ({"token_flags": (1, 2)}, ""),
    ],
)
def test_what_must_not_be_trained_says_why(
    recorder: Any, changes: dict[str, Any], reason: str
) -> None:
    (segment,) = assemble(link_all([recorder.turn((1,), (2, 3), **changes)]), set())
    assert why_not_trainable(segment, is_incomplete=False) == reason


def test_one_bad_turn_spoils_its_trajectory(recorder: Any) -> None:
    turns = [
        recorder.turn((1,), (2,)),
        recorder.turn((1, 2, 3), (4,), stop=StopCause.ABORT, was_delivered=False),
    ]
    (segment,) = assemble(link_all(turns), set())
    assert why_not_trainable(segment, is_incomplete=False) == "stop: abort"


@pytest.mark.parametrize(("follow_up", "reason"), [((1, 2, 3), ""), ((1, 9, 3), NOT_DELIVERED)])
def test_an_answer_was_seen_when_the_next_prompt_repeats_it(
    recorder: Any, follow_up: tuple[int, ...], reason: str
) -> None:
    turns = [recorder.turn((1,), (2,), was_delivered=False), recorder.turn(follow_up, (4,))]
    (segment,) = assemble(link_all(turns), set())
    assert why_not_trainable(segment, is_incomplete=False) == reason


class Client:
    """Draws a session: every turn continues, cuts, edits, retries or forgets what went before."""

    def __init__(self, recorder: Any, draw: Any) -> None:
        self.recorder, self.draw = recorder, draw
        self.turns: list[TurnRecord] = []

    def step(self) -> None:
        small = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)
        moves = ["new", "extend", "drop", "cut", "repeat"] if self.turns else ["new"]
        move = self.draw(st.sampled_from(moves))
        base = self.draw(st.sampled_from(self.turns)) if self.turns else None
        prompt: tuple[int, ...] = self.draw(small)
        request_hash = f"h{len(self.turns)}"
        if base is not None and move == "extend":
            prompt = (*base.prompt_ids, *base.completion_ids, *prompt)
        elif base is not None and move == "drop":
            prompt = (*base.prompt_ids, *prompt)
        elif base is not None and move == "cut":
            prompt = (*base.prompt_ids[:-1], *prompt)
        elif base is not None and move == "repeat":
            prompt, request_hash = base.prompt_ids, base.request_hash
        num_choices = self.draw(st.integers(1, 2))
        for choice in range(num_choices):
            self.turns.append(
                self.recorder.turn(
                    prompt,
                    self.draw(small),
                    request_id=f"r{request_hash}-{len(self.turns) - choice}",
                    request_hash=request_hash,
                    choice=choice,
                    num_choices=num_choices,
                    created_at=float(len(self.turns) - choice),
                    was_delivered=self.draw(st.booleans()),
                )
            )


@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150
)
@given(st.data())
def test_whatever_clients_do_a_turn_is_in_one_trajectory_or_superseded(
    recorder: Any, data: st.DataObject
) -> None:
    client = Client(recorder, data.draw)
    for _ in range(data.draw(st.integers(1, 8))):
        client.step()
    facts = link_all(client.turns)
    chains: list[Segment] = assemble(facts, set())
    own = [t.turn_id for s in chains for t in s.turns]
    assert sorted(own) == sorted(t.turn_id for t in facts if t.superseded_by is None)
    for segment in chains:
        for before, after in zip(segment.turns, segment.turns[1:], strict=False):
            assert after.parent_turn_id == before.turn_id
    # built in two parts, as late turns are, nothing is built twice or left out
    cut = data.draw(st.integers(0, len(facts)))
    early = [t for s in assemble(facts[:cut], set()) for t in s.turns]
    late = [t for s in assemble(facts, {t.turn_id for t in early}) for t in s.turns]
    rest = {t.turn_id for t in late}
    assert rest.isdisjoint(t.turn_id for t in early)
    assert {t.turn_id for t in facts if t.superseded_by is None} <= rest | {
        t.turn_id for t in early
    }
