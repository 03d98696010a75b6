"""Score jobs: once per trajectory whatever the broker does, retried when the scorer failed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import ScoreSettings, ServeSettings, Settings
from m1serve.envs import task_ids
from m1serve.envs.base import build_problem
from m1serve.online_rl.scorers.sandbox import Sandbox
from m1serve.online_rl.scoring import score_job
from m1serve.online_rl.tasks import ScoreWorker
from m1serve.store import Store
from m1serve.store.jobs import SCORE
from m1serve.store.records import JournalEntry, SessionEnded, TurnRecord
from m1serve.types import Mode, RewardStatus

MakeTurn = Callable[..., TurnRecord]
SETTINGS = ScoreSettings(timeout_s=1.0)
FAILING = """
import os
from m1serve.online_rl.scorers.process import serve

class Failing:
    name, version = "failing", "1"
    def score(self, turns, task_id):
        os.abort()

serve(lambda task_id: Failing())
"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(timeout_s=20.0, memory_bytes=2**31) as box:
        yield box


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(f"sqlite:///{tmp_path / 'm1serve.db'}", job_max_attempts=2)
    yield store
    store.close()


@pytest.fixture
def play_sum(store: Store, tok: ChatTokenizer, make_turn: MakeTurn) -> Callable[..., str]:
    """Ingests one finished session; returns its trajectory's id."""

    def play(
        reply: str, *, task_id: str | None, session: str = "s1", mode: Mode = Mode.TRAIN
    ) -> str:
        ids = [*tok.encode_control(reply), tok.eos_id]
        turn = make_turn([1, 2, 3], ids, session_id=session, task_id=task_id, mode=mode)
        ended = SessionEnded(session_id=session, tenant_id="t", at=9.0, reason="end")
        records = [turn, ended]
        store.ledger.ingest(
            [JournalEntry(writer=session, seq=i, record=r) for i, r in enumerate(records, 1)]
        )
        (row,) = store.ledger.list_trajectories(session_id=session)
        return row.trajectory_id

    return play


SUM = task_ids("train", "sums", 1)[0]
ANSWER = getattr(build_problem(SUM), "answer")  # noqa: B009 - the problem's union has no common one
RIGHT = f"<think>\nadd\n</think>\n\\boxed{{{ANSWER}}}"


def test_a_job_delivered_three_times_scores_once(
    store: Store, tok: ChatTokenizer, sandbox: Sandbox, play_sum: Callable[..., str]
) -> None:
    trajectory_id = play_sum(RIGHT, task_id=SUM)
    (job,) = store.jobs.due()
    done = [score_job(store, tok, sandbox, job.job_id, SETTINGS) for _ in range(3)]
    assert done == [True, False, False]
    (reward,) = store.rewards.list(trajectory_id)
    assert (reward.value, reward.scorer, reward.status) == (1.0, "boxed", RewardStatus.OK)
    assert store.ledger.trajectory(trajectory_id).state == "eligible"
    assert store.jobs.counts() == {"done": 1}


def test_a_wrong_answer_is_a_reward_of_zero(
    store: Store, tok: ChatTokenizer, sandbox: Sandbox, play_sum: Callable[..., str]
) -> None:
    trajectory_id = play_sum("no box", task_id=SUM)
    (job,) = store.jobs.due()
    assert score_job(store, tok, sandbox, job.job_id, SETTINGS)
    view = store.ledger.trajectory(trajectory_id)
    assert (view.state, view.reward) == ("eligible", 0.0)


def test_a_crashing_scorer_is_retried_and_then_masked(
    store: Store, tok: ChatTokenizer, tmp_path: Path, play_sum: Callable[..., str]
) -> None:
    trajectory_id = play_sum(RIGHT, task_id=SUM)
    (job,) = store.jobs.due()
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    command = (sys.executable, "-I", str(script))
    with Sandbox(timeout_s=5.0, memory_bytes=2**31, command=command) as failing:
        assert not score_job(store, tok, failing, job.job_id, SETTINGS)
        assert store.rewards.list(trajectory_id) == []
        # not before its time
        assert not score_job(store, tok, failing, job.job_id, SETTINGS)
        assert store.jobs.counts() == {"queued": 1}
        assert [d.job_id for d in store.jobs.due(now=2e9)] == [job.job_id]
        while store.jobs.counts() == {"queued": 1}:
            score_job(store, tok, failing, job.job_id, SETTINGS)
    (reward,) = store.rewards.list(trajectory_id)
    assert (reward.value, reward.status) == (None, RewardStatus.CRASHED)
    view = store.ledger.trajectory(trajectory_id)
    assert (view.state, view.reward) == ("ineligible", None)


def test_an_unknown_task_is_masked_at_once(
    store: Store, tok: ChatTokenizer, sandbox: Sandbox, play_sum: Callable[..., str]
) -> None:
    trajectory_id = play_sum(RIGHT, task_id="mystery/1")
    (job,) = store.jobs.due()
    assert score_job(store, tok, sandbox, job.job_id, SETTINGS)
    (reward,) = store.rewards.list(trajectory_id)
    assert (reward.value, reward.status) == (None, RewardStatus.UNCOMPUTABLE)
    assert "no scorer for task" in reward.evidence


def test_eval_traffic_is_scored_and_never_eligible(
    store: Store, tok: ChatTokenizer, sandbox: Sandbox, play_sum: Callable[..., str]
) -> None:
    trajectory_id = play_sum(RIGHT, task_id=SUM, mode=Mode.EVAL)
    (job,) = store.jobs.due()
    assert score_job(store, tok, sandbox, job.job_id, SETTINGS)
    view = store.ledger.trajectory(trajectory_id)
    assert (view.state, view.reward) == ("ineligible", 1.0)


def test_a_job_nobody_does_is_buried(store: Store, tok: ChatTokenizer, sandbox: Sandbox) -> None:
    job_id = store.jobs.enqueue("dance", "dance:1", {})
    assert not score_job(store, tok, sandbox, job_id, SETTINGS)
    assert store.jobs.counts() == {"dead": 1}


def test_a_missing_trajectory_is_retried(
    store: Store, tok: ChatTokenizer, sandbox: Sandbox
) -> None:
    job_id = store.jobs.enqueue(SCORE, "score:x", {"trajectory_id": "x"})
    assert not score_job(store, tok, sandbox, job_id, SETTINGS)
    assert store.jobs.counts() == {"queued": 1}


def test_the_reaper_sends_what_is_due_once(tmp_path: Path) -> None:
    worker = ScoreWorker(Settings(home=tmp_path))
    job_id = worker.store.jobs.enqueue(SCORE, "score:x", {"trajectory_id": "x"})
    sent: list[str] = []
    assert worker.reap(sent.append) == 1
    assert worker.reap(sent.append) == 0
    assert worker.reap(sent.append, resend_s=0.0) == 1
    assert sent == [job_id, job_id]
    assert worker.close_idle_sessions() == 0
    worker.retrain()
    assert [r.trigger for r in worker.store.runs.list()] == ["schedule"]
    worker.close()


def test_beat_gives_up_on_feedback_as_late_as_the_settings_say(
    tmp_path: Path, make_turn: MakeTurn
) -> None:
    serve = ServeSettings(session_idle_s=0.0)
    turn = make_turn([1, 2], [3], task_id=None)
    entry = JournalEntry(writer="w", seq=1, record=turn)
    for wait_s, num in ((3600.0, 0), (1e-6, 1)):
        score = ScoreSettings(feedback_wait_s=wait_s)
        worker = ScoreWorker(Settings(home=tmp_path, score=score, serve=serve))
        worker.store.ledger.ingest([entry])
        worker.close_idle_sessions()
        assert worker.give_up_feedback() == num
        worker.close()


def test_sessions_that_beat_closes_get_as_many_attempts_as_the_settings_say(
    tmp_path: Path, make_turn: MakeTurn
) -> None:
    score = ScoreSettings(max_attempts=7)
    serve = ServeSettings(session_idle_s=0.0)
    worker = ScoreWorker(Settings(home=tmp_path, score=score, serve=serve))
    turn = make_turn([1, 2], [3], task_id=SUM)
    worker.store.ledger.ingest([JournalEntry(writer="w", seq=1, record=turn)])
    assert worker.close_idle_sessions() == 1
    (job,) = worker.store.jobs.due()
    claimed = worker.store.jobs.claim(job.job_id, lease_s=9.0)
    assert claimed is not None
    assert claimed.max_attempts == 7
    worker.close()
