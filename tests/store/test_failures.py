"""Data that no run gets through must not block training for ever."""

from __future__ import annotations

from typing import Any

import pytest

from m1serve.types import VersionState


def fail(workshop: Any, reason: str = "ValueError: bad turn") -> list[str]:
    """A run that claims what there is, and fails."""
    lease = workshop.lease()
    claimed: list[str] = workshop.claim(lease)
    workshop.store.runs.finish(lease.run_id, lease.token, "failed", reason)
    return claimed


def test_data_is_burned_when_a_second_run_failed_with_it(workshop: Any) -> None:
    first = workshop.eligible("a")
    assert fail(workshop) == [first]
    assert workshop.state(first) == "eligible"
    second = workshop.eligible("b")
    assert fail(workshop, "KeyError: 7") == [first, second]
    assert (workshop.state(first), workshop.state(second)) == ("burned", "eligible")
    view = workshop.store.ledger.trajectory(first)
    assert view.state_reason == "2 runs failed with it, the last of: KeyError: 7"
    assert fail(workshop) == [second]
    assert fail(workshop) == []


@pytest.mark.parametrize("outcome", ["skipped", "rejected"])
def test_other_endings_are_no_failure(workshop: Any, outcome: str) -> None:
    trajectory_id = workshop.eligible("a")
    for _ in range(3):
        lease = workshop.lease()
        assert workshop.claim(lease) == [trajectory_id]
        workshop.store.runs.finish(lease.run_id, lease.token, outcome, "no signal")
    assert workshop.state(trajectory_id) == "eligible"


def test_a_failure_after_the_commit_counts_too(workshop: Any) -> None:
    trajectory_id = workshop.eligible("a")
    runs, weights = workshop.store.runs, workshop.store.weights
    for number, state in ((1, "released"), (2, "burned")):
        lease = workshop.lease()
        assert workshop.claim(lease) == [trajectory_id]
        workshop.commit(lease, f"nano@{number}")
        weights.advance(f"nano@{number}", VersionState.CANDIDATE, VersionState.REJECTED, "failed")
        runs.release(lease.run_id, lease.token, "release")
        runs.finish(lease.run_id, lease.token, "failed", "EngineError: no")
        assert workshop.state(trajectory_id) == state


def test_runs_that_kill_their_trainers_count_too(workshop: Any) -> None:
    trajectory_id = workshop.eligible("a")
    fail(workshop)
    workshop.claim(workshop.lease(lease_s=1, now=0.0))
    for attempt in range(1, 5):
        assert workshop.store.runs.claim_next("me", 1, now=10.0 * attempt) is not None
    assert workshop.store.runs.claim_next("me", 1, now=100.0) is None
    assert workshop.state(trajectory_id) == "burned"
    assert "lost its lease" in workshop.store.ledger.trajectory(trajectory_id).state_reason


def test_what_a_failed_run_promoted_stays_consumed(workshop: Any) -> None:
    trajectory_id = workshop.eligible("a")
    fail(workshop)
    lease = workshop.lease()
    workshop.claim(lease)
    workshop.commit(lease)
    workshop.store.runs.finish(lease.run_id, lease.token, "failed", "after its promotion")
    assert workshop.state(trajectory_id) == "consumed"
