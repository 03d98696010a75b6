from __future__ import annotations

from typing import Any

from m1serve.store import Store

NOW = 1000.0


def enqueue(store: Store, key: str = "k", **options: Any) -> str:
    return store.jobs.enqueue("work", key, {"n": 1}, now=NOW, **options)


def test_a_key_is_enqueued_once(store: Store) -> None:
    assert enqueue(store) == enqueue(store)
    assert store.jobs.counts() == {"queued": 1}


def test_three_deliveries_of_one_job_complete_it_once(store: Store) -> None:
    job_id = enqueue(store)
    claims = [store.jobs.claim(job_id, 60, now=NOW + i) for i in range(3)]
    (claim,) = [c for c in claims if c is not None]
    assert (claim.payload, claim.attempt) == ({"n": 1}, 1)
    assert not store.jobs.complete(job_id, "somebody else's token")
    assert store.jobs.complete(job_id, claim.token)
    assert not store.jobs.complete(job_id, claim.token)
    assert store.jobs.claim(job_id, 60, now=NOW + 99) is None
    assert store.jobs.counts() == {"done": 1}


def test_a_worker_whose_lease_ran_out_can_store_nothing(store: Store) -> None:
    job_id = enqueue(store)
    dead = store.jobs.claim(job_id, 10, now=NOW)
    assert store.jobs.claim(job_id, 10, now=NOW + 9) is None
    alive = store.jobs.claim(job_id, 10, now=NOW + 11)
    assert dead is not None
    assert alive is not None
    assert alive.attempt == 2
    assert not store.jobs.complete(job_id, dead.token)
    assert not store.jobs.fail(job_id, dead.token, "late", None)
    assert store.jobs.complete(job_id, alive.token)


def due(store: Store, now: float) -> list[str]:
    return [job.job_id for job in store.jobs.due(now, resend_s=30)]


def test_a_job_is_due_until_it_is_sent_and_again_when_nobody_took_it(store: Store) -> None:
    job_id = enqueue(store)
    assert due(store, NOW) == due(store, NOW + 1) == [job_id]
    store.jobs.mark_sent([job_id], now=NOW + 1)
    assert due(store, NOW + 30) == []
    assert due(store, NOW + 32) == [job_id]


def test_a_running_job_is_due_when_its_lease_ends(store: Store) -> None:
    job_id = enqueue(store)
    store.jobs.mark_sent([job_id], now=NOW)
    store.jobs.claim(job_id, 100, now=NOW)
    assert due(store, NOW + 99) == []
    assert due(store, NOW + 101) == [job_id]
    store.jobs.mark_sent([job_id], now=NOW + 101)
    assert due(store, NOW + 102) == []


def test_a_failed_job_waits_for_its_time(store: Store) -> None:
    job_id = enqueue(store)
    claim = store.jobs.claim(job_id, 60, now=NOW)
    assert claim is not None
    assert store.jobs.fail(job_id, claim.token, "no luck", 20, now=NOW + 1)
    assert due(store, NOW + 20) == []
    assert store.jobs.claim(job_id, 60, now=NOW + 20) is None
    assert due(store, NOW + 22) == [job_id]


def test_the_last_attempt_buries_the_job(store: Store) -> None:
    job_id = enqueue(store, max_attempts=2)
    for attempt in range(2):
        claim = store.jobs.claim(job_id, 60, now=NOW + attempt)
        assert claim is not None
        assert store.jobs.fail(job_id, claim.token, "no luck", 0, now=NOW + attempt)
    assert store.jobs.counts() == {"dead": 1}
    assert due(store, NOW + 1000) == []


def test_an_error_without_a_retry_buries_the_job_at_once(store: Store) -> None:
    job_id = enqueue(store)
    claim = store.jobs.claim(job_id, 60, now=NOW)
    assert claim is not None
    assert store.jobs.fail(job_id, claim.token, "hopeless \0", None)
    assert store.jobs.counts() == {"dead": 1}


def test_a_job_that_kills_its_workers_is_buried_by_the_reaper(store: Store) -> None:
    job_id = enqueue(store, max_attempts=2)
    for attempt in range(2):
        assert store.jobs.claim(job_id, 1, now=NOW + 2 * attempt) is not None
    assert store.jobs.claim(job_id, 1, now=NOW + 50) is None
    assert due(store, NOW + 50) == []
    assert store.jobs.counts() == {"dead": 1}


def test_a_dead_score_job_lets_the_group_go_on_without_its_trajectory(workshop: Any) -> None:
    store = workshop.store
    lost = workshop.episode("a", group_key="g")
    scored = workshop.eligible("b", group_key="g")
    assert workshop.claim(workshop.lease()) == []
    (job,) = [
        claim
        for d in store.jobs.due()
        if (claim := store.jobs.claim(d.job_id, 60)) is not None
        and claim.payload == {"trajectory_id": lost}
    ]
    store.jobs.fail(job.job_id, job.token, "sandbox gone", None)
    view = store.ledger.trajectory(lost)
    assert (view.state, view.state_reason) == ("ineligible", "reward: sandbox gone")
    lease = store.runs.claim_next("me", 60, now=2e10)
    assert lease is not None
    store.runs.finish(lease.run_id, lease.token, "skipped", "empty")
    assert workshop.claim(workshop.lease()) == [scored]
