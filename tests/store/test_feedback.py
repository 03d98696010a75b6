"""Feedback on completions, said again, and sessions nobody can place."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest
import zstandard

from m1serve.store.codec import decode_record, encode_record
from m1serve.store.records import FeedbackGiven, SessionSource
from m1serve.store.trajectories import AMBIGUOUS


def feedback(**changes: Any) -> FeedbackGiven:
    values: dict[str, Any] = {
        "feedback_id": "f",
        "tenant_id": "tenant",
        "key_id": "key",
        "at": 1.0,
        "session_id": None,
        "turn_id": None,
        "metric": "reward",
        "value": 0.5,
    }
    return FeedbackGiven(**{**values, **changes})


@pytest.mark.parametrize("is_early", [True, False])
def test_feedback_on_a_completion_reaches_all_its_choices(workshop: Any, is_early: bool) -> None:
    store, recorder = workshop.store, workshop.recorder
    given = recorder.entries(feedback(request_id="r"))
    if is_early:
        store.ledger.ingest(given)
    choices = [
        recorder.turn((1,), (2,), request_id="r", choice=i, num_choices=2, task_id=None)
        for i in range(2)
    ]
    store.ledger.ingest(recorder.entries(*choices, recorder.end()))
    other = workshop.episode("other", task_id=None)
    if not is_early:
        store.ledger.ingest(given)
    rows = store.ledger.list_trajectories(session_id="session")
    assert [(row.state, row.reward) for row in rows] == [("eligible", 0.5)] * 2
    assert workshop.state(other) == "pending"


def test_feedback_on_another_tenants_completion_rewards_nothing(workshop: Any) -> None:
    trajectory_id = workshop.episode("s", task_id=None, request_id="r")
    given = feedback(request_id="r", tenant_id="other")
    workshop.store.ledger.ingest(workshop.recorder.entries(given))
    assert workshop.state(trajectory_id) == "pending"


def test_the_same_words_again_count_once_and_as_of_then(workshop: Any) -> None:
    store, recorder = workshop.store, workshop.recorder
    trajectory_id = workshop.episode("s", task_id=None)
    up = feedback(feedback_id="up", session_id="s", value=1.0)
    store.ledger.ingest(recorder.entries(up, dataclasses.replace(up, at=2.0)))
    assert len(store.rewards.list(trajectory_id)) == 1
    down = feedback(feedback_id="down", session_id="s", value=0.0, at=3.0)
    store.ledger.ingest(recorder.entries(down))
    assert store.ledger.trajectory(trajectory_id).reward == 0.0
    store.ledger.ingest(recorder.entries(dataclasses.replace(up, at=4.0)))
    assert store.ledger.trajectory(trajectory_id).reward == 1.0
    store.ledger.ingest(recorder.entries(dataclasses.replace(up, at=4.0)))
    assert [r.value for r in store.rewards.list(trajectory_id)] == [1.0, 0.0, 1.0]


def test_an_ambiguous_session_is_kept_scored_and_never_trained(workshop: Any) -> None:
    store, recorder = workshop.store, workshop.recorder
    first = recorder.turn((1,), (2,), session_source=SessionSource.AMBIGUOUS)
    second = recorder.turn((1, 2, 3), (4,), session_source=SessionSource.INFERRED)
    store.ledger.ingest(recorder.entries(first, second, recorder.end()))
    (row,) = store.ledger.list_trajectories()
    assert (row.state, row.state_reason, row.num_turns) == ("ineligible", AMBIGUOUS, 2)
    workshop.reward(row.trajectory_id)
    assert workshop.state(row.trajectory_id) == "ineligible"
    assert store.ledger.turn(first.turn_id).session_source is SessionSource.AMBIGUOUS


def test_a_record_of_the_first_schema_is_read(recorder: Any) -> None:

    turn = recorder.turn((1,), (2,))
    _, kind, fields = msgpack.unpackb(zstandard.decompress(encode_record(turn)), use_list=False)
    del fields["session_source"]
    assert decode_record(zstandard.compress(msgpack.packb([1, kind, fields]))) == turn
