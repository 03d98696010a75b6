from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from m1serve.errors import FencedError, StoreError
from m1serve.store import Store
from m1serve.store.journal import REASON_LOST
from m1serve.types import Mode, StopCause, VersionSpan, VersionState


def span(version: int) -> dict[str, object]:
    return {"version_spans": (VersionSpan(start=0, end=2, weights_version=f"nano@{version}"),)}


def test_an_equal_request_that_nobody_began_is_the_same_run(store: Store) -> None:
    run_id = store.runs.request("nano", "schedule", {"lr": 1e-4})
    assert store.runs.request("nano", "schedule", {"lr": 1e-4}) == run_id
    assert store.runs.request("nano", "schedule", {"lr": 2e-4}) != run_id
    store.runs.claim_next("me", 60)
    assert store.runs.request("nano", "schedule", {"lr": 1e-4}) != run_id


def test_a_run_is_claimed_by_one_and_only_one_a_model_is_live(store: Store) -> None:
    run_id = store.runs.request("nano", "first", {"lr": 0.1})
    store.runs.request("nano", "second")
    other = store.runs.request("other", "first")
    lease = store.runs.claim_next("me", 60)
    assert lease is not None
    assert (lease.run_id, lease.overrides, lease.fence) == (run_id, {"lr": 0.1}, 1)
    second = store.runs.claim_next("you", 60)
    assert second is not None
    assert second.run_id == other
    assert store.runs.claim_next("you", 60) is None
    store.runs.finish(lease.run_id, lease.token, "skipped", "no data")
    assert store.runs.claim_next("you", 60) is not None


def test_a_run_whose_lease_ran_out_is_resumed_and_its_old_holder_fenced(store: Store) -> None:
    run_id = store.runs.request("nano", "test")
    old = store.runs.claim_next("dead", 10, now=0.0)
    assert old is not None
    store.runs.set_phase(run_id, old.token, "train")
    store.runs.heartbeat(run_id, old.token, now=8.0)
    assert store.runs.claim_next("alive", 10, now=17.0) is None
    new = store.runs.claim_next("alive", 10, now=19.0)
    assert new is not None
    assert (new.run_id, new.fence, new.phase) == (run_id, 2, "train")
    for lost in (
        lambda: store.runs.heartbeat(run_id, old.token),
        lambda: store.runs.set_phase(run_id, old.token, "commit"),
        lambda: store.runs.finish(run_id, old.token, "failed", "x"),
        lambda: store.runs.release(run_id, old.token, "burn"),
    ):
        with pytest.raises(FencedError, match="alive"):
            lost()
    store.runs.heartbeat(run_id, new.token)


def test_a_run_that_kills_its_trainers_fails_and_gives_its_data_back(workshop: Any) -> None:
    trajectory_id = workshop.eligible("s")
    lease = workshop.lease(lease_s=1, now=0.0)
    workshop.claim(lease)
    store = workshop.store
    for attempt in range(1, 5):
        assert store.runs.claim_next("me", 1, now=10.0 * attempt) is not None
    assert store.runs.claim_next("me", 1, now=100.0) is None
    run = store.runs.get(lease.run_id)
    assert (run.state, run.reason) == ("failed", "lost its lease 5 times in phase ''")
    assert workshop.state(trajectory_id) == "eligible"


@pytest.mark.parametrize(
    ("arrows", "outcome", "left"),
    [
        ([], "failed", VersionState.REJECTED),
        ([VersionState.VERIFIED, VersionState.GATED], "failed", VersionState.REJECTED),
        ([VersionState.REJECTED], "rejected", VersionState.REJECTED),
        (
            [VersionState.VERIFIED, VersionState.GATED, VersionState.ACTIVE],
            "promoted",
            VersionState.ACTIVE,
        ),
    ],
)
def test_a_run_given_up_after_its_commit_ends_as_its_version_did(
    workshop: Any, arrows: list[VersionState], outcome: str, left: VersionState
) -> None:
    workshop.eligible("s")
    lease = workshop.lease(lease_s=1, now=0.0)
    workshop.claim(lease)
    workshop.commit(lease)
    store, before = workshop.store, VersionState.CANDIDATE
    for state in arrows:
        assert store.weights.advance("nano@1", before, state, "test")
        before = state
    for attempt in range(1, 5):
        assert store.runs.claim_next("me", 1, now=10.0 * attempt) is not None
    assert store.runs.claim_next("me", 1, now=100.0) is None
    assert store.runs.get(lease.run_id).state == outcome
    assert store.weights.get("nano@1").state is left


def test_a_claim_is_frozen_for_the_run_and_whoever_resumes_it(workshop: Any) -> None:
    claimed = [workshop.eligible(f"s{i}") for i in range(3)]
    lease = workshop.lease(lease_s=10, now=0.0)
    assert workshop.claim(lease) == claimed
    workshop.eligible("later")
    assert workshop.claim(lease) == claimed
    resumed = workshop.store.runs.claim_next("other", 60, now=100.0)
    assert (resumed.run_id, resumed.parent_version) == (lease.run_id, "nano@0")
    assert workshop.claim(resumed) == claimed
    with pytest.raises(StoreError, match="a resumed run keeps its parent"):
        workshop.store.runs.claim_groups(
            resumed.run_id,
            resumed.token,
            model_id="nano",
            parent_version="nano@7",
            max_groups=9,
            max_age_versions=9,
        )


def test_an_empty_claim_is_frozen_too(workshop: Any) -> None:
    lease = workshop.lease()
    assert workshop.claim(lease) == []
    workshop.eligible("later")
    assert workshop.claim(lease) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": Mode.EVAL},
        {"consent": False},
        {"model_id": "other"},
        span(5),
        {"version_spans": (), "completion_ids": (), "logprobs": (), "token_flags": ()},
    ],
)
def test_what_may_not_be_trained_is_never_claimed(workshop: Any, changes: Any) -> None:
    workshop.eligible("s", **changes)
    assert workshop.claim(workshop.lease()) == []


def test_unscored_trajectories_are_never_claimed(workshop: Any) -> None:
    workshop.episode("pending")
    workshop.reward(workshop.episode("masked"), None)
    assert workshop.claim(workshop.lease()) == []


@pytest.mark.parametrize(("version", "is_claimed"), [(0, False), (1, True), (3, True), (4, False)])
def test_only_versions_near_the_parent_are_claimed(
    workshop: Any, version: int, is_claimed: bool
) -> None:
    workshop.eligible("s", **span(version))
    lease = workshop.lease()
    views = workshop.store.runs.claim_groups(
        lease.run_id,
        lease.token,
        model_id="nano",
        parent_version="nano@3",
        max_groups=9,
        max_age_versions=2,
    )
    assert len(views) == is_claimed


def test_a_group_waits_for_its_open_session(workshop: Any) -> None:
    done = workshop.eligible("a", group_key="g")
    store, recorder = workshop.store, workshop.recorder
    store.ledger.ingest(recorder.entries(recorder.turn((1,), (2,), session_id="b", group_key="g")))
    first = workshop.lease()
    assert workshop.claim(first) == []
    store.runs.finish(first.run_id, first.token, "skipped", "")
    store.ledger.ingest(recorder.entries(recorder.end("b")))
    second = workshop.lease()
    assert workshop.claim(second) == []
    store.runs.finish(second.run_id, second.token, "skipped", "")
    (row,) = store.ledger.list_trajectories(session_id="b")
    workshop.reward(row.trajectory_id, 0.0)
    assert workshop.claim(workshop.lease()) == [done, row.trajectory_id]


def test_a_group_with_a_stale_member_is_not_torn_apart(workshop: Any) -> None:
    workshop.eligible("old", group_key="g", **span(0))
    workshop.eligible("new", group_key="g", **span(3))
    alone = workshop.eligible("alone", **span(3))
    lease = workshop.lease()
    views = workshop.store.runs.claim_groups(
        lease.run_id,
        lease.token,
        model_id="nano",
        parent_version="nano@3",
        max_groups=9,
        max_age_versions=2,
    )
    assert [v.trajectory_id for v in views] == [alone]


def test_masked_and_aborted_members_do_not_hold_their_group_back(workshop: Any) -> None:
    good = workshop.eligible("a", group_key="g")
    workshop.reward(workshop.episode("b", group_key="g"), None)
    workshop.eligible("c", group_key="g", stop=StopCause.ABORT)
    assert workshop.claim(workshop.lease()) == [good]


def test_a_member_that_nobody_judges_holds_its_group_up_for_a_time_only(workshop: Any) -> None:
    ledger = workshop.store.ledger
    good = workshop.eligible("a", group_key="g")
    silent = workshop.episode("b", group_key="g", task_id=None)
    scored = workshop.episode("c")
    lease = workshop.lease()
    assert workshop.claim(lease) == []
    workshop.store.runs.finish(lease.run_id, lease.token, "skipped", "nothing to train on")
    now = time.time()
    assert ledger.give_up_feedback("nano", 3600.0, now + 3500) == 0
    assert ledger.give_up_feedback("other", 3600.0, now + 3700) == 0
    assert ledger.give_up_feedback("nano", 3600.0, now + 3700) == 1
    view = ledger.trajectory(silent)
    assert (view.state, view.state_reason) == ("ineligible", "feedback: none within 3600 s")
    assert workshop.state(scored) == "pending"
    assert workshop.claim(workshop.lease()) == [good]


def test_groups_are_claimed_whole_and_oldest_first(workshop: Any) -> None:
    sessions = [("g1", "a"), ("g2", "b"), ("g1", "c"), (None, "d"), ("g2", "e"), ("g1", "f")]
    ids = {name: workshop.eligible(name, group_key=group) for group, name in sessions}
    assert workshop.claim(workshop.lease(), max_groups=2) == [ids[n] for n in "abcef"]


def test_groups_of_two_tenants_with_one_name_are_two_groups(workshop: Any) -> None:
    store, recorder = workshop.store, workshop.recorder
    for tenant in ("t1", "t2"):
        turn = recorder.turn((1,), (2,), session_id=tenant, tenant_id=tenant, group_key="g")
        store.ledger.ingest(recorder.entries(turn, recorder.end(tenant, tenant)))
        workshop.reward(store.ledger.list_trajectories(tenant_id=tenant)[0].trajectory_id)
    assert len(workshop.claim(workshop.lease(), max_groups=1)) == 1


def test_a_commit_consumes_the_data_and_registers_the_candidate(workshop: Any) -> None:
    workshop.first_version()
    trajectory_id = workshop.eligible("s")
    lease = workshop.lease()
    workshop.claim(lease)
    workshop.commit(lease)
    workshop.commit(lease)
    store = workshop.store
    assert workshop.state(trajectory_id) == "consumed"
    version = store.weights.get("nano@1")
    assert (version.state, version.parent) == (VersionState.CANDIDATE, "nano@0")
    assert (version.run_id, version.manifest_digest) == (lease.run_id, "digest")
    run = store.runs.get(lease.run_id)
    assert (run.state, run.weights_version, run.metrics) == ("committed", "nano@1", {"loss": 0.5})
    assert store.weights.next_number("nano") == 2


def test_a_fenced_trainer_commits_nothing(workshop: Any) -> None:
    trajectory_id = workshop.eligible("s")
    old = workshop.lease(lease_s=1, now=0.0)
    workshop.claim(old)
    new = workshop.store.runs.claim_next("other", 60, now=10.0)
    with pytest.raises(FencedError):
        workshop.commit(old)
    assert workshop.state(trajectory_id) == "claimed"
    assert workshop.store.weights.get("nano@1") is None
    workshop.commit(new)


def test_a_run_that_committed_resumes_behind_its_training(workshop: Any) -> None:
    workshop.eligible("s")
    lease = workshop.lease(lease_s=1, now=0.0)
    claimed = workshop.claim(lease)
    workshop.commit(lease)
    resumed = workshop.store.runs.claim_next("other", 60, now=10.0)
    assert resumed.weights_version == "nano@1"
    assert workshop.claim(resumed) == claimed
    with pytest.raises(StoreError, match="cannot commit nano@2"):
        workshop.commit(resumed, "nano@2")


def test_nothing_is_committed_without_a_claim(workshop: Any) -> None:
    lease = workshop.lease()
    with pytest.raises(StoreError, match="claim its groups first"):
        workshop.commit(lease)


def test_a_skipped_run_gives_its_data_back(workshop: Any) -> None:
    trajectory_id = workshop.eligible("s")
    lease = workshop.lease()
    workshop.claim(lease)
    workshop.store.runs.finish(lease.run_id, lease.token, "skipped", "one group", {"groups": 1})
    assert workshop.state(trajectory_id) == "eligible"
    run = workshop.store.runs.get(lease.run_id)
    assert (run.state, run.reason, run.metrics) == ("skipped", "one group", {"groups": 1})
    assert run.finished_at is not None
    assert workshop.claim(workshop.lease()) == [trajectory_id]


@pytest.mark.parametrize(("how", "state"), [("release", "eligible"), ("burn", "burned")])
def test_a_claim_can_be_given_back_or_burned(workshop: Any, how: Any, state: str) -> None:
    trajectory_id = workshop.eligible("s")
    lease = workshop.lease()
    workshop.claim(lease)
    assert workshop.store.runs.release(lease.run_id, lease.token, how) == 1
    assert workshop.state(trajectory_id) == state
    with pytest.raises(StoreError, match="froze 1 trajectories but holds 0"):
        workshop.commit(lease)


@pytest.mark.parametrize(
    ("how", "state", "again"), [("release", "released", True), ("burn", "burned", False)]
)
def test_a_rejected_runs_data_is_released_or_burned(
    workshop: Any, how: Any, state: str, again: bool
) -> None:
    trajectory_id = workshop.eligible("s")
    lease = workshop.lease()
    workshop.claim(lease)
    workshop.commit(lease)
    store = workshop.store
    with pytest.raises(StoreError, match="only data of a rejected version"):
        store.runs.release(lease.run_id, lease.token, how)
    store.weights.advance("nano@1", VersionState.CANDIDATE, VersionState.REJECTED, "parity")
    assert store.runs.release(lease.run_id, lease.token, how) == 1
    assert workshop.state(trajectory_id) == state
    store.runs.finish(lease.run_id, lease.token, "rejected", "parity")
    second = workshop.lease()
    assert workshop.claim(second) == ([trajectory_id] if again else [])
    workshop.commit(second, "nano@2")


def test_released_data_of_a_session_that_lost_a_turn_is_not_trained_again(workshop: Any) -> None:
    trajectory_id = workshop.eligible("s")
    lease = workshop.lease()
    workshop.claim(lease)
    workshop.commit(lease)
    store, recorder = workshop.store, workshop.recorder
    store.weights.advance("nano@1", VersionState.CANDIDATE, VersionState.REJECTED, "parity")
    store.runs.release(lease.run_id, lease.token, "release")
    store.runs.finish(lease.run_id, lease.token, "rejected", "parity")
    lost = dataclasses.replace(recorder.end("s"), reason=REASON_LOST)
    store.ledger.ingest(recorder.entries(lost))
    assert workshop.state(trajectory_id) == "ineligible"
    assert workshop.claim(workshop.lease()) == []


def test_only_a_committed_run_is_promoted(workshop: Any) -> None:
    lease = workshop.lease()
    with pytest.raises(StoreError, match="only a committed run"):
        workshop.store.runs.finish(lease.run_id, lease.token, "promoted", "x")


def test_runs_are_listed_newest_first(store: Store) -> None:
    one, two = store.runs.request("nano", "a"), store.runs.request("nano", "b")
    assert [run.run_id for run in store.runs.list("nano")] == [two, one]
    assert store.runs.list("other") == []
    assert store.runs.get("nothing") is None
