"""What goes in comes out: turns to the bit, trajectories whole, each job once."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from m1serve.errors import StoreError
from m1serve.store import Store
from m1serve.store.journal import REASON_LOST
from m1serve.store.records import FeedbackGiven, TurnsDelivered
from m1serve.store.tables import TurnRow
from m1serve.store.trajectories import TURN_LOST
from m1serve.types import Mode, RewardStatus, StopCause, VersionSpan

token = st.integers(0, 200_063)
logprob = st.floats(max_value=0.0, width=32, allow_nan=False)


@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    prompt=st.one_of(
        st.lists(token, max_size=40),
        st.integers(0, 1030).map(lambda n: [(i * 977) % 200_064 for i in range(n + 1000)]),
    ),
    sampled=st.lists(st.tuples(token, logprob, st.integers(0, 7)), max_size=60),
)
def test_a_turn_comes_back_exactly(
    store: Store, recorder: Any, prompt: list[int], sampled: list[tuple[int, float, int]]
) -> None:
    num = len(sampled)
    turn = recorder.turn(
        prompt,
        tuple(t for t, _, _ in sampled),
        logprobs=tuple(p for _, p, _ in sampled),
        sampled_logprobs=tuple(p for _, p, _ in reversed(sampled)),
        token_flags=tuple(f for _, _, f in sampled),
        version_spans=tuple(
            VersionSpan(start=a, end=b, weights_version=f"nano@{a}")
            for a, b in ((0, num // 2), (num // 2, num))
            if b > a
        ),
        stop_detail="\n\n",
    )
    store.ledger.ingest(recorder.entries(turn))
    assert store.ledger.turn(turn.turn_id) == turn


def test_ingesting_twice_is_ingesting_once(store: Store, recorder: Any) -> None:
    feedback = FeedbackGiven(
        feedback_id="f",
        tenant_id="tenant",
        key_id="key",
        at=1.0,
        session_id="session",
        turn_id=None,
        metric="thumb",
        value=1.0,
    )
    entries = recorder.entries(
        recorder.turn((1,), (2,)), recorder.turn((1, 2, 3), (4,)), recorder.end(), feedback
    )
    assert store.ledger.ingest(entries) == 4
    assert store.ledger.ingest(entries) == 0
    assert store.ledger.ingest(entries[1:3]) == 0
    assert store.ledger.count_turns() == 2
    assert store.ledger.count_trajectories() == {"pending": 1}
    assert store.jobs.counts() == {"queued": 1}


def test_the_same_turn_from_another_journal_is_known(store: Store, recorder: Any) -> None:
    turn = recorder.turn((1,), (2,))
    assert store.ledger.ingest([recorder.entry(turn), recorder.entry(turn)]) == 1
    assert store.ledger.ingest([recorder.entry(turn)]) == 0


def test_turns_of_mode_off_leave_no_trace(store: Store, recorder: Any) -> None:
    assert store.ledger.ingest(recorder.entries(recorder.turn((1,), (2,), mode=Mode.OFF))) == 0
    assert store.ledger.count_turns() == 0
    assert store.ledger.session("tenant", "session") is None


def drifts(store: Store) -> dict[str, int]:
    """How many turns were linked how."""
    with store._db.read() as session:
        rows = session.execute(select(TurnRow.drift, TurnRow.superseded_by))
        return Counter("superseded" if retry else drift for drift, retry in rows)


def test_a_session_of_many_turns_is_one_trajectory(store: Store, recorder: Any) -> None:
    turns = []
    history: tuple[int, ...] = tuple(range(2000))
    for i in range(5):
        turn = recorder.turn(history, (i, i + 1))
        turns.append(turn)
        history = (*turn.prompt_ids, *turn.completion_ids, 7, 8)
    store.ledger.ingest(recorder.entries(*turns, recorder.end()))
    (row,) = store.ledger.list_trajectories()
    view = store.ledger.trajectory(row.trajectory_id)
    assert view.turns == tuple(turns)
    assert (view.context, view.state, view.reward) == ((), "pending", None)
    assert (row.num_turns, row.num_trainable) == (5, 10)
    assert drifts(store) == {"root": 1, "extend": 4}


def test_a_closed_session_enqueues_its_scoring_in_the_same_breath(
    store: Store, recorder: Any
) -> None:
    store.ledger.ingest(recorder.entries(recorder.turn((1,), (2,))))
    assert store.jobs.counts() == {}
    store.ledger.ingest(recorder.entries(recorder.end()))
    (due,) = store.jobs.due()
    (row,) = store.ledger.list_trajectories()
    claimed = store.jobs.claim(due.job_id, 60)
    assert claimed is not None
    assert (claimed.kind, claimed.payload) == ("score", {"trajectory_id": row.trajectory_id})


def test_idle_sessions_close_and_fresh_ones_stay_open(store: Store, recorder: Any) -> None:
    for i in range(120):
        store.ledger.ingest(recorder.entries(recorder.turn((1,), (2,), session_id=f"s{i}")))
    assert store.ledger.close_idle_sessions(60.0, now=recorder.clock - 50 + 60) == 69
    sessions = [store.ledger.session("tenant", f"s{i}") for i in range(120)]
    assert [s is not None and s.closed_at is None for s in sessions] == [False] * 69 + [True] * 51
    assert store.ledger.close_idle_sessions(60.0, now=recorder.clock - 50 + 60) == 0
    assert store.jobs.counts() == {"queued": 69}


@pytest.mark.parametrize(
    ("mode", "task_id", "num_jobs", "state"),
    [
        (Mode.TRAIN, "sums/train/1", 1, "pending"),
        (Mode.TRAIN, None, 0, "pending"),
        (Mode.EVAL, "sums/gate/1", 1, "ineligible"),
        (Mode.EVAL, None, 0, "ineligible"),
    ],
)
def test_a_task_is_what_a_scorer_needs(
    workshop: Any, mode: Mode, task_id: str | None, num_jobs: int, state: str
) -> None:
    trajectory_id = workshop.episode("s", mode=mode, task_id=task_id)
    assert len(workshop.store.jobs.due()) == num_jobs
    assert workshop.state(trajectory_id) == state


def test_an_eval_trajectory_keeps_its_reward_and_stays_out_of_training(workshop: Any) -> None:
    trajectory_id = workshop.eligible("s", mode=Mode.EVAL)
    view = workshop.store.ledger.trajectory(trajectory_id)
    assert (view.reward, view.reward_status) == (1.0, RewardStatus.OK)
    assert (view.state, view.state_reason) == ("ineligible", "mode: eval")


def test_a_late_turn_reopens_nothing_and_gets_its_own_trajectory(
    store: Store, recorder: Any
) -> None:
    first = recorder.turn((1,), (2,))
    late = recorder.turn((1, 2, 3), (4,))
    store.ledger.ingest(recorder.entries(first, recorder.end()))
    store.ledger.ingest(recorder.entries(late))
    views = [store.ledger.trajectory(row.trajectory_id) for row in store.ledger.list_trajectories()]
    assert [[t.turn_id for t in v.turns] for v in views] == [[late.turn_id], [first.turn_id]]
    assert views[0].context == (first,)
    assert views[0].conversation == (first, late)
    assert store.jobs.counts() == {"queued": 2}


def test_a_late_turn_in_the_batch_of_the_end_is_late_too(store: Store, recorder: Any) -> None:
    first, end = recorder.turn((1,), (2,)), recorder.end()
    late = recorder.turn((1, 2, 3), (4,))
    store.ledger.ingest(recorder.entries(first, end, late))
    assert sorted(r.num_turns for r in store.ledger.list_trajectories()) == [1, 1]


def test_an_end_read_before_its_turns_closes_them_when_they_come(
    store: Store, recorder: Any
) -> None:
    turn, end = recorder.turn((1,), (2,)), recorder.end()
    store.ledger.ingest(recorder.entries(end))
    assert store.ledger.count_trajectories() == {}
    store.ledger.ingest(recorder.entries(turn))
    assert store.ledger.count_trajectories() == {"pending": 1}
    session = store.ledger.session("tenant", "session")
    assert session is not None
    assert session.closed_at is not None


def test_a_child_read_before_its_parent_is_linked_when_the_parent_comes(
    store: Store, recorder: Any
) -> None:
    parent = recorder.turn((1,), (2,))
    child = recorder.turn((1, 2, 3), (4,))
    grandchild = recorder.turn((1, 2, 3, 4, 5), (6,))
    store.ledger.ingest(recorder.entries(grandchild))
    store.ledger.ingest(recorder.entries(child))
    store.ledger.ingest(recorder.entries(parent))
    assert drifts(store) == {"root": 1, "extend": 2}
    store.ledger.ingest(recorder.entries(recorder.end()))
    (row,) = store.ledger.list_trajectories()
    assert row.num_turns == 3


def test_sessions_of_two_tenants_with_one_name_stay_apart(store: Store, recorder: Any) -> None:
    mine = recorder.turn((1,), (2,), tenant_id="a")
    yours = recorder.turn((1, 2, 3), (4,), tenant_id="b")
    store.ledger.ingest(recorder.entries(mine, yours, recorder.end(tenant_id="a")))
    assert drifts(store) == {"root": 2}
    assert [r.tenant_id for r in store.ledger.list_trajectories()] == ["a"]
    session = store.ledger.session("b", "session")
    assert session is not None
    assert session.closed_at is None


def test_an_aborted_turn_is_kept_and_never_trained(workshop: Any) -> None:
    trajectory_id = workshop.eligible("s", stop=StopCause.ABORT, was_delivered=False)
    view = workshop.store.ledger.trajectory(trajectory_id)
    assert view.turns[0].completion_ids == (4, 5)
    assert (view.state, view.state_reason) == ("ineligible", "stop: abort")


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (1, 2)])
def test_a_turn_is_trained_once_its_delivery_is_known(
    store: Store, recorder: Any, cuts: tuple[int, ...]
) -> None:
    turn = recorder.turn((1, 2), (3,), was_delivered=False)
    sent = TurnsDelivered(session_id="session", tenant_id="tenant", turn_ids=(turn.turn_id,))
    entries = recorder.entries(turn, sent, recorder.end())
    for start, end in itertools.pairwise((0, *cuts, 3)):
        store.ledger.ingest(entries[start:end])
    assert store.ledger.turn(turn.turn_id) == dataclasses.replace(turn, was_delivered=True)
    (row,) = store.ledger.list_trajectories()
    assert row.state == "pending"


@pytest.mark.parametrize(
    ("value", "state"), [(1.0, "eligible"), (None, "ineligible"), ("unscored", "pending")]
)
def test_a_delivery_known_after_the_end_still_counts(workshop: Any, value: Any, state: str) -> None:
    trajectory_id = workshop.episode("s", was_delivered=False)
    if value != "unscored":
        workshop.reward(trajectory_id, value)
    assert workshop.state(trajectory_id) == "ineligible"
    (turn,) = workshop.store.ledger.trajectory(trajectory_id).turns
    sent = TurnsDelivered(session_id="s", tenant_id="tenant", turn_ids=(turn.turn_id,))
    entries = workshop.recorder.entries(sent)
    assert workshop.store.ledger.ingest(entries) == 1
    assert workshop.store.ledger.ingest(entries) == 0
    assert workshop.state(trajectory_id) == state


def test_an_answer_taken_for_a_lost_one_gets_its_trajectory_when_it_was_not(
    store: Store, recorder: Any
) -> None:
    one = recorder.turn((1, 2), (3,), request_hash="same")
    two = recorder.turn((1, 2), (4,), request_hash="same", was_delivered=False)
    store.ledger.ingest(recorder.entries(one, two, recorder.end()))
    assert store.ledger.count_trajectories() == {"pending": 1}
    sent = TurnsDelivered(session_id="session", tenant_id="tenant", turn_ids=(two.turn_id,))
    store.ledger.ingest(recorder.entries(sent))
    assert store.ledger.count_trajectories() == {"pending": 2}


def test_a_turn_whose_delivery_nobody_saw_is_kept_and_never_trained(workshop: Any) -> None:
    trajectory_id = workshop.eligible("s", was_delivered=False)
    assert workshop.state(trajectory_id) == "ineligible"


def test_a_superseded_answer_is_kept_and_belongs_to_no_trajectory(
    store: Store, recorder: Any
) -> None:
    lost = recorder.turn((1, 2), (3,), request_hash="same", was_delivered=False)
    seen = recorder.turn((1, 2), (4,), request_hash="same", retry_count=1)
    store.ledger.ingest(recorder.entries(lost))
    store.ledger.ingest(recorder.entries(seen, recorder.end()))
    assert store.ledger.turn(lost.turn_id) == lost
    (row,) = store.ledger.list_trajectories()
    assert [t.turn_id for t in store.ledger.trajectory(row.trajectory_id).turns] == [seen.turn_id]
    assert drifts(store) == {"root": 1, "superseded": 1}


def test_a_side_request_is_neither_scored_nor_trained(store: Store, recorder: Any) -> None:
    main = recorder.turn(range(100), (1,))
    side = recorder.turn(range(500, 600), (2,))
    store.ledger.ingest(recorder.entries(main, side, recorder.end()))
    assert store.ledger.count_trajectories() == {"pending": 1, "ineligible": 1}
    assert store.jobs.counts() == {"queued": 1}


def feedback(**changes: Any) -> FeedbackGiven:
    values: dict[str, Any] = {
        "feedback_id": "f",
        "tenant_id": "tenant",
        "key_id": "key",
        "at": 1.0,
        "session_id": "s",
        "turn_id": None,
        "metric": "reward",
        "value": 0.5,
    }
    return FeedbackGiven(**{**values, **changes})


@pytest.mark.parametrize("is_early", [True, False])
def test_feedback_is_the_reward_where_no_scorer_can_be(workshop: Any, is_early: bool) -> None:
    store, recorder = workshop.store, workshop.recorder
    if is_early:
        store.ledger.ingest(recorder.entries(feedback()))
    trajectory_id = workshop.episode("s", task_id=None)
    if not is_early:
        assert workshop.state(trajectory_id) == "pending"
        store.ledger.ingest(recorder.entries(feedback()))
    view = store.ledger.trajectory(trajectory_id)
    assert (view.state, view.reward) == ("eligible", 0.5)
    (stored,) = store.rewards.list(trajectory_id)
    assert stored.scorer == "feedback"


def test_feedback_given_up_on_still_counts_when_it_comes(workshop: Any) -> None:
    store, recorder = workshop.store, workshop.recorder
    trajectory_id = workshop.episode("s", task_id=None)
    store.ledger.give_up_feedback("nano", 1.0, time.time() + 2)
    store.ledger.ingest(recorder.entries(feedback()))
    view = store.ledger.trajectory(trajectory_id)
    assert (view.state, view.state_reason) == ("eligible", "")


def test_feedback_makes_nothing_eligible_of_a_session_that_lost_a_turn(workshop: Any) -> None:
    store, recorder = workshop.store, workshop.recorder
    trajectory_id = workshop.episode("s", task_id=None)
    store.ledger.give_up_feedback("nano", 1.0, time.time() + 2)
    lost = dataclasses.replace(recorder.end("s"), reason=REASON_LOST)
    store.ledger.ingest(recorder.entries(lost))
    store.ledger.ingest(recorder.entries(feedback()))
    view = store.ledger.trajectory(trajectory_id)
    assert (view.state, view.state_reason) == ("ineligible", TURN_LOST)


def test_feedback_on_a_turn_reaches_its_trajectory_only(workshop: Any) -> None:
    store, recorder = workshop.store, workshop.recorder
    ids = [workshop.episode(name, task_id=None) for name in ("s", "other")]
    turn_id = store.ledger.trajectory(ids[0]).turns[0].turn_id
    store.ledger.ingest(recorder.entries(feedback(session_id=None, turn_id=turn_id)))
    assert [workshop.state(i) for i in ids] == ["eligible", "pending"]


@pytest.mark.parametrize("changes", [{"tenant_id": "other"}, {"metric": "thumb"}])
def test_other_feedback_rewards_nothing(workshop: Any, changes: dict[str, Any]) -> None:
    trajectory_id = workshop.episode("s", task_id=None)
    workshop.store.ledger.ingest(workshop.recorder.entries(feedback(**changes)))
    assert workshop.state(trajectory_id) == "pending"


def test_feedback_never_overrules_a_verifier(workshop: Any) -> None:
    trajectory_id = workshop.episode("s")
    workshop.store.ledger.ingest(workshop.recorder.entries(feedback()))
    assert workshop.state(trajectory_id) == "pending"


def test_text_that_a_database_refuses_is_stored_without_it(store: Store, recorder: Any) -> None:
    turn = recorder.turn((1,), (2,), stop_detail="a\0b")
    store.ledger.ingest(recorder.entries(turn))
    assert store.ledger.turn(turn.turn_id) == dataclasses.replace(turn, stop_detail="a\ufffdb")


def test_the_export_has_every_token_as_json(workshop: Any) -> None:
    workshop.eligible("a")
    workshop.episode("b")
    stream = io.StringIO()
    assert workshop.store.ledger.export(stream, state="eligible") == 1
    (line,) = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert line["turns"][0]["completion_ids"] == [4, 5]
    assert line["turns"][0]["version_spans"][0]["weights_version"] == "nano@0"
    assert line["reward"] == 1.0


def test_what_is_not_there_is_said_so(store: Store) -> None:
    with pytest.raises(StoreError, match="no turn 'x'"):
        store.ledger.turn("x")
    with pytest.raises(StoreError, match="no trajectory 'x'"):
        store.ledger.trajectory("x")
