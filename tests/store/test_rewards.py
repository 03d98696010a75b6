from __future__ import annotations

import math
from typing import Any

import pytest

from m1serve.errors import StoreError
from m1serve.store.jobs import ClaimedJob
from m1serve.types import Reward, RewardStatus


def score_job(workshop: Any) -> ClaimedJob:
    (due,) = workshop.store.jobs.due()
    claimed = workshop.store.jobs.claim(due.job_id, 60)
    assert isinstance(claimed, ClaimedJob)
    return claimed


def record(
    workshop: Any, trajectory_id: str, reward: Reward, job: Any = None, scorer: str = "env"
) -> bool:
    recorded: bool = workshop.store.rewards.record(
        trajectory_id, scorer=scorer, scorer_version="3", reward=reward, job=job
    )
    return recorded


def test_a_reward_makes_its_trajectory_eligible_and_completes_the_job(workshop: Any) -> None:
    trajectory_id = workshop.episode("s")
    job = score_job(workshop)
    reward = Reward(value=0.75, components={"format": 1.0, "answer": 0.5}, evidence="4 = 4 \0")
    assert record(workshop, trajectory_id, reward, (job.job_id, job.token))
    view = workshop.store.ledger.trajectory(trajectory_id)
    assert (view.state, view.reward, view.reward_status) == ("eligible", 0.75, RewardStatus.OK)
    assert workshop.store.jobs.counts() == {"done": 1}
    (stored,) = workshop.store.rewards.list(trajectory_id)
    assert (stored.scorer, stored.scorer_version) == ("env", "3")
    assert stored.components == {"format": 1.0, "answer": 0.5}
    assert stored.evidence == "4 = 4 \ufffd"


def test_a_worker_that_lost_its_job_stores_no_reward(workshop: Any) -> None:
    trajectory_id = workshop.episode("s")
    job = score_job(workshop)
    assert not record(workshop, trajectory_id, Reward(value=1.0), (job.job_id, "old token"))
    assert workshop.store.rewards.list(trajectory_id) == []
    assert workshop.state(trajectory_id) == "pending"
    assert record(workshop, trajectory_id, Reward(value=0.0), (job.job_id, job.token))
    assert not record(workshop, trajectory_id, Reward(value=1.0), (job.job_id, job.token))
    assert workshop.store.ledger.trajectory(trajectory_id).reward == 0.0


def test_a_reward_that_could_not_be_computed_is_none_and_never_trains(workshop: Any) -> None:
    trajectory_id = workshop.episode("s")
    record(workshop, trajectory_id, Reward(value=None, status=RewardStatus.TIMEOUT))
    view = workshop.store.ledger.trajectory(trajectory_id)
    assert (view.reward, view.state) == (None, "ineligible")
    assert (view.reward_status, view.state_reason) == (RewardStatus.TIMEOUT, "reward: timeout")


def test_a_newer_reward_supersedes_and_the_older_row_stays(workshop: Any) -> None:
    trajectory_id = workshop.episode("s")
    record(workshop, trajectory_id, Reward(value=None, status=RewardStatus.CRASHED))
    record(workshop, trajectory_id, Reward(value=1.0))
    record(workshop, trajectory_id, Reward(value=0.5), scorer="other")
    first, second, other = workshop.store.rewards.list(trajectory_id)
    assert [r.is_current for r in (first, second, other)] == [False, True, True]
    assert (second.supersedes, other.supersedes) == (first.reward_id, None)
    assert workshop.state(trajectory_id) == "eligible"


def test_rescoring_what_is_claimed_does_not_pull_it_back(workshop: Any) -> None:
    trajectory_id = workshop.eligible("s")
    workshop.claim(workshop.lease())
    record(workshop, trajectory_id, Reward(value=None, status=RewardStatus.CRASHED))
    assert workshop.state(trajectory_id) == "claimed"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(workshop: Any, value: float) -> None:
    trajectory_id = workshop.episode("s")
    with pytest.raises(StoreError, match="finite"):
        record(workshop, trajectory_id, Reward(value=value))


def test_a_reward_for_nothing_is_refused(workshop: Any) -> None:
    with pytest.raises(StoreError, match="no trajectory 'x'"):
        record(workshop, "x", Reward(value=1.0))
