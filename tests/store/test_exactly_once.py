"""Several processes and threads at once, some of them dying: still each trajectory trains once."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import sqlalchemy as sa

from m1serve.errors import FencedError, StoreError
from m1serve.types import Reward, VersionState

TRAINER = """
import random, sys, time
from m1serve.errors import FencedError
from m1serve.store import Store
from m1serve.types import VersionState
store, seed, deadline = Store.open(sys.argv[1]), int(sys.argv[2]), time.monotonic() + 60
choose = random.Random(seed)
while time.monotonic() < deadline:
    num_eligible = store.ledger.count_trajectories().get("eligible", 0)
    is_live = any(run.state in ("running", "committed") for run in store.runs.list(limit=1000))
    if num_eligible == 0 and not is_live:
        break
    if num_eligible > 0:
        store.runs.request("nano", "trainer")
    lease = store.runs.claim_next(f"trainer {seed}", 0.3, max_attempts=1000)
    if lease is None:
        time.sleep(0.01)
        continue
    try:
        if lease.weights_version is None:
            views = store.runs.claim_groups(
                lease.run_id, lease.token, model_id="nano", parent_version="nano@0",
                max_groups=2, max_age_versions=4,
            )
            if choose.random() < 0.3:
                continue  # dies here: its lease must run out
            if choose.random() < 0.2:
                time.sleep(0.5)  # so slow that somebody else may take over
            if not views:
                store.runs.finish(lease.run_id, lease.token, "skipped", "no data")
                continue
            version = f"nano@{store.weights.next_number('nano')}"
            store.runs.commit(
                lease.run_id, lease.token, weights_version=version, parent="nano@0",
                path="/v", manifest_digest="d", metrics={},
            )
            if choose.random() < 0.3:
                continue  # dies between the commit and the gates
        version = store.runs.get(lease.run_id).weights_version
        store.weights.advance(version, VersionState.CANDIDATE, VersionState.REJECTED, "test")
        if choose.random() < 0.2:
            store.runs.release(lease.run_id, lease.token, "burn")
        store.runs.finish(lease.run_id, lease.token, "rejected", "test")
    except FencedError:
        pass
store.close()
"""


def test_processes_that_die_and_race_train_each_trajectory_once(
    workshop: Any, database_url: str
) -> None:
    store = workshop.store
    workshop.first_version()
    ids = [workshop.eligible(f"s{i}", group_key=f"g{i // 2}") for i in range(24)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TRAINER, database_url, str(seed)], stderr=subprocess.PIPE
        )
        for seed in range(3)
    ]
    errors = [process.communicate(timeout=90)[1].decode() for process in processes]
    assert errors == ["", "", ""]
    states = [workshop.state(i) for i in ids]
    assert set(states) <= {"consumed", "burned"}
    committed = [run for run in store.runs.list(limit=1000) if run.weights_version is not None]
    assert sum(run.num_claimed for run in committed) == len(ids)
    assert len({run.weights_version for run in committed}) == len(committed)


def test_two_trainers_with_one_run_commit_it_once(workshop: Any) -> None:
    workshop.first_version()
    trajectory_id = workshop.eligible("s")
    leases = [workshop.lease(lease_s=1, now=0.0)]
    leases += [workshop.store.runs.claim_next("x", 1, now=10.0 * i) for i in range(1, 4)]
    workshop.claim(leases[-1])
    outcomes: list[str] = []

    def commit(lease: Any, number: int) -> None:
        try:
            workshop.commit(lease, f"nano@{number}")
            outcomes.append("committed")
        except FencedError:
            outcomes.append("fenced")

    threads = [
        threading.Thread(target=commit, args=(lease, i + 1)) for i, lease in enumerate(leases)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["committed", "fenced", "fenced", "fenced"]
    assert workshop.state(trajectory_id) == "consumed"
    assert workshop.store.weights.get("nano@4").state is VersionState.CANDIDATE


def test_many_workers_complete_each_job_once(workshop: Any) -> None:
    store = workshop.store
    ids = [workshop.episode(f"s{i}") for i in range(20)]
    job_ids = [job.job_id for job in store.jobs.due(limit=100)]
    recorded: list[str] = []
    failed: list[BaseException] = []

    def work() -> None:
        # every job is delivered to every worker
        for job_id in job_ids:
            try:
                job = store.jobs.claim(job_id, 60)
                if job is not None and store.rewards.record(
                    str(job.payload["trajectory_id"]),
                    scorer="env",
                    scorer_version="1",
                    reward=Reward(value=1.0),
                    job=(job.job_id, job.token),
                ):
                    recorded.append(job_id)
            except StoreError as error:
                failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert sorted(recorded) == sorted(job_ids)
    assert store.jobs.counts() == {"done": 20}
    assert all(len(store.rewards.list(i)) == 1 for i in ids)


def test_two_runs_of_two_models_never_share_a_trajectory(workshop: Any) -> None:
    workshop.eligible("s")
    store = workshop.store
    first = workshop.lease()
    workshop.claim(first)
    store.runs.request("other", "test")
    second = store.runs.claim_next("me", 60)
    views = store.runs.claim_groups(
        second.run_id,
        second.token,
        model_id="nano",
        parent_version="nano@0",
        max_groups=9,
        max_age_versions=9,
    )
    assert views == []


def test_the_index_refuses_what_every_check_before_it_let_through(
    workshop: Any, database_url: str
) -> None:
    trajectory_id = workshop.eligible("s")
    first = workshop.lease()
    workshop.claim(first)
    workshop.commit(first)
    engine = sa.create_engine(database_url)
    with engine.begin() as connection:
        # as if a bug, or a person with SQL, had freed it
        connection.execute(
            sa.text("UPDATE trajectories SET state = 'eligible', claim_run_id = NULL")
        )
    engine.dispose()
    store = workshop.store
    store.weights.advance("nano@1", VersionState.CANDIDATE, VersionState.REJECTED, "x")
    store.runs.finish(first.run_id, first.token, "rejected", "x")
    second = workshop.lease()
    assert workshop.claim(second) == [trajectory_id]
    with pytest.raises(StoreError, match="already trained by another committed run"):
        workshop.commit(second, "nano@2")
    assert store.weights.get("nano@2") is None
