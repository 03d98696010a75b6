"""Erased sessions: no token of theirs is left, others keep theirs, and what learned is told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from sqlalchemy import select

from m1serve.errors import StoreError
from m1serve.store import Store
from m1serve.store.prompts import BLOCK_TOKENS
from m1serve.store.records import FeedbackGiven
from m1serve.store.tables import FeedbackRow, PromptBlockRow, TurnRow
from m1serve.types import Reward

SHARED = tuple(range(2 * BLOCK_TOKENS))


def num_blocks(store: Store) -> int:
    with store._db.read() as session:
        return len(session.scalars(select(PromptBlockRow.block_id)).all())


def test_tokens_go_and_what_others_share_stays(workshop: Any) -> None:
    store, recorder = workshop.store, workshop.recorder
    own = tuple(range(9_000, 9_000 + BLOCK_TOKENS))
    gone = recorder.turn((*SHARED, *own, 1), (2, 3), session_id="gone", sampled_logprobs=(0.0, 0.0))
    kept = recorder.turn((*SHARED, 5), (6,), session_id="kept")
    store.ledger.ingest(recorder.entries(gone, kept, recorder.end("gone"), recorder.end("kept")))
    (row,) = store.ledger.list_trajectories(session_id="gone")
    workshop.reward(row.trajectory_id)
    assert num_blocks(store) == 3
    erasure = store.ledger.erase("tenant", "gone", actor="test")
    assert (erasure.num_turns, erasure.num_blocks, erasure.trained_versions) == (1, 1, ())
    assert num_blocks(store) == 2
    assert store.ledger.turn(kept.turn_id) == kept
    with pytest.raises(StoreError, match="was it erased"):
        store.ledger.turn(gone.turn_id)
    with pytest.raises(StoreError, match="until they are erased"):
        store.ledger.trajectory(row.trajectory_id)
    with store._db.read() as session:
        stored = session.scalars(select(TurnRow).where(TurnRow.turn_id == gone.turn_id)).one()
        assert {stored.completion, stored.prompt_tail, stored.logprobs, stored.token_flags} == {
            b"\0"
        }
        assert (stored.sampled_logprobs, stored.num_completion) == (None, 2)
        assert stored.erased_at == erasure.erased_at
    (after,) = store.ledger.list_trajectories(session_id="gone")
    assert (after.state, after.state_reason) == ("ineligible", "erased")
    report = store.ledger.session_report("tenant", "gone")
    assert report is not None
    assert report.erased_at == erasure.erased_at
    assert [entry.action for entry in store.audit.list()] == ["session.erase"]


def test_the_blocks_of_two_tenants_never_meet(workshop: Any) -> None:
    store, recorder = workshop.store, workshop.recorder
    turns = [recorder.turn(SHARED, (1,), tenant_id=name) for name in ("a", "b")]
    store.ledger.ingest(recorder.entries(*turns))
    assert num_blocks(store) == 4
    store.ledger.erase("a", "session", actor="test")
    assert num_blocks(store) == 2
    assert store.ledger.turn(turns[1].turn_id) == turns[1]


def test_erasing_again_changes_nothing(workshop: Any) -> None:
    workshop.episode("s")
    first = workshop.store.ledger.erase("tenant", "s", actor="test")
    again = workshop.store.ledger.erase("tenant", "s", actor="test")
    assert again == dataclasses.replace(first, num_turns=0)
    assert len(workshop.store.audit.list()) == 1


def test_what_was_trained_on_it_and_from_that_is_told(workshop: Any) -> None:
    store = workshop.store
    workshop.first_version()
    workshop.eligible("s")
    lease = workshop.lease()
    workshop.claim(lease)
    with pytest.raises(StoreError, match=f"run {lease.run_id} is being trained"):
        store.ledger.erase("tenant", "s", actor="test")
    workshop.commit(lease)
    store.weights.register("nano@2", "nano", "/v/2", parent="nano@1")
    store.weights.register("nano@3", "nano", "/v/3", parent="nano@0")
    erasure = store.ledger.erase("tenant", "s", actor="test")
    assert erasure.trained_versions == ("nano@1", "nano@2")
    (row,) = store.ledger.list_trajectories(session_id="s")
    assert row.state == "consumed"


def test_jobs_rewards_and_feedback_of_an_erased_session_say_nothing_more(workshop: Any) -> None:
    store, recorder = workshop.store, workshop.recorder
    trajectory_id = workshop.episode("s")
    secret = Reward(value=1.0, evidence="what the user said")
    store.rewards.record(trajectory_id, scorer="x", scorer_version="1", reward=secret, job=None)
    report = store.ledger.session_report("tenant", "s")
    assert report is not None
    turn = report.turns[0]
    targets: list[dict[str, Any]] = [
        {"session_id": "s", "turn_id": None},
        {"session_id": None, "turn_id": turn.turn_id},
        {"session_id": None, "turn_id": None, "request_id": turn.completion_id},
        {"session_id": "s", "turn_id": None, "tenant_id": "stranger"},
    ]
    for number, target in enumerate(targets):
        said = FeedbackGiven(
            feedback_id=f"f{number}",
            key_id="key",
            at=1.0,
            metric="thumb",
            value=1.0,
            comment="what the user said",
            **{"tenant_id": "tenant", **target},
        )
        store.ledger.ingest(recorder.entries(said))
    report = store.ledger.session_report("tenant", "s")
    assert report is not None
    assert [one.feedback_id for one in report.feedback] == ["f0", "f1", "f2"]
    store.ledger.erase("tenant", "s", actor="test")
    assert store.jobs.counts() == {"dead": 1}
    assert [reward.evidence for reward in store.rewards.list(trajectory_id)] == [""]
    with store._db.read() as session:
        comments = select(FeedbackRow.comment).order_by(FeedbackRow.feedback_id)
        assert session.scalars(comments).all() == ["", "", "", "what the user said"]
    workshop.reward(trajectory_id)
    (row,) = store.ledger.list_trajectories(session_id="s")
    assert row.state == "ineligible"


def test_a_session_that_goes_on_after_it_was_erased_can_be_erased_again(workshop: Any) -> None:
    store, recorder = workshop.store, workshop.recorder
    first = recorder.turn((1, 2), (3,))
    store.ledger.ingest(recorder.entries(first))
    store.ledger.erase("tenant", "session", actor="test")
    second = recorder.turn((1, 2, 3, 4), (5,))
    store.ledger.ingest(recorder.entries(second))
    rows = store.ledger.list_trajectories(session_id="session")
    views = store.ledger.trajectories([row.trajectory_id for row in rows])
    assert [[t.turn_id for t in view.conversation] for view in views] == [[second.turn_id]]
    assert store.ledger.erase("tenant", "session", actor="test").num_turns == 1
    assert store.ledger.trajectories([row.trajectory_id for row in rows]) == []


def test_an_unknown_session_is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="no session 'x' of tenant 'a'"):
        store.ledger.erase("a", "x", actor="test")


def test_sessions_are_erased_when_their_time_is_over(workshop: Any) -> None:
    store, recorder = workshop.store, workshop.recorder
    for name in ("old", "new"):
        workshop.episode(name)
        recorder.clock += 1000
    store.ledger.ingest(recorder.entries(recorder.turn((1,), (2,), session_id="open")))
    last = {name: store.ledger.session("tenant", name).last_seen_at for name in ("old", "new")}
    now = last["new"] + 500
    assert store.ledger.erase_expired(None, now) == 0
    assert store.ledger.erase_expired(900.0, now) == 1
    assert store.ledger.erase_expired(900.0, now) == 0
    states = {r.session_id: r.state_reason for r in store.ledger.list_trajectories()}
    assert states == {"old": "erased", "new": ""}
    assert [entry.actor for entry in store.audit.list()] == ["retention"]
