"""The Celery worker as a process: scores over the embedded broker, survives kill -9, stops on
SIGTERM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import ScoreSettings, Settings, TrainSettings
from m1serve.envs import task_ids
from m1serve.online_rl.tasks import (
    CLOSE_IDLE,
    ERASE_EXPIRED,
    GIVE_UP_FEEDBACK,
    REAP,
    RETRAIN,
    make_celery,
    prepare_broker,
)
from m1serve.store import Store
from m1serve.store.records import JournalEntry, SessionEnded, TurnRecord

MakeTurn = Callable[..., TurnRecord]
RUN = """
import sys
from pathlib import Path
from m1serve.config import ModelSettings, Settings
from m1serve.online_rl.tasks import run_worker
home, model = map(Path, sys.argv[1:])
raise SystemExit(run_worker(Settings(home=home, model=ModelSettings(path=model))))
"""


@contextmanager
def worker(
    home: Path, model_dir: Path, *, broker_url: str | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    broker = {} if broker_url is None else {"M1SERVE_SCORE__BROKER_URL": broker_url}
    child = subprocess.Popen(
        [sys.executable, "-c", RUN, str(home), str(model_dir)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | broker,
        start_new_session=True,
        stderr=subprocess.PIPE,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def wait_until(is_true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.05)


@pytest.fixture
def fill(tmp_path: Path, tok: ChatTokenizer, make_turn: MakeTurn) -> Iterator[Callable[..., Store]]:
    """The store under `tmp_path` with finished sessions that wait for their scores."""
    store = Store.open(Settings(home=tmp_path).database)

    def filled(num: int) -> Store:
        for i, task_id in enumerate(task_ids("train", "lookup", num)):
            ids = [*tok.encode_text("not allowed"), tok.eos_id]
            turn = make_turn([1, 2], ids, session_id=str(i), task_id=task_id)
            ended = SessionEnded(session_id=str(i), tenant_id="t", at=9.0, reason="end")
            records = enumerate((turn, ended), 1)
            store.ledger.ingest([JournalEntry(writer=str(i), seq=s, record=r) for s, r in records])
        return store

    yield filled
    store.close()


def test_jobs_survive_a_killed_worker_and_sigterm_is_clean(
    tmp_path: Path, tiny_dir: Path, fill: Callable[..., Store]
) -> None:
    store = fill(40)
    with worker(tmp_path, tiny_dir) as first:
        wait_until(lambda: store.jobs.counts().get("done", 0) > 0)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    with worker(tmp_path, tiny_dir) as second:
        # a job that was running when its worker died waits for its lease
        wait_until(lambda: store.jobs.counts().get("queued", 0) == 0)
        begin = time.monotonic()
        second.send_signal(signal.SIGTERM)
        assert second.wait(timeout=20) == 0
        assert time.monotonic() - begin < 10
    counts = store.jobs.counts()
    assert counts["done"] >= 39
    rewards = [store.rewards.list(t.trajectory_id) for t in store.ledger.list_trajectories()]
    assert all(len(r) <= 1 for r in rewards)
    assert sum(map(len, rewards)) == counts["done"]


@pytest.mark.services
def test_jobs_travel_over_redis_and_none_is_lost_with_its_messages(
    tmp_path: Path, tiny_dir: Path, fill: Callable[..., Store]
) -> None:
    url = os.environ.get("TEST_REDIS_URL")
    if url is None:
        pytest.skip("TEST_REDIS_URL names no Redis server")
    store = fill(40)
    with worker(tmp_path, tiny_dir, broker_url=url) as first:
        wait_until(lambda: store.jobs.counts().get("done", 0) > 0)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    assert not (tmp_path / "broker").exists()
    with redis.Redis.from_url(url) as broker:
        broker.flushdb()
    with worker(tmp_path, tiny_dir, broker_url=url) as second:
        wait_until(lambda: store.jobs.counts().get("queued", 0) == 0)
        second.send_signal(signal.SIGTERM)
        assert second.wait(timeout=20) == 0
    counts = store.jobs.counts()
    assert counts["done"] >= 39
    rewards = [store.rewards.list(t.trajectory_id) for t in store.ledger.list_trajectories()]
    assert all(len(r) <= 1 for r in rewards)
    assert sum(map(len, rewards)) == counts["done"]


def test_messages_are_json_and_results_are_nowhere(tmp_path: Path) -> None:
    app = make_celery(Settings(home=tmp_path))
    assert app.conf.accept_content == ["json"]
    assert app.conf.result_backend is None
    assert app.conf.task_acks_late


def test_beat_retrains_only_when_asked(tmp_path: Path) -> None:
    always = {REAP, CLOSE_IDLE, GIVE_UP_FEEDBACK, ERASE_EXPIRED}
    assert set(make_celery(Settings(home=tmp_path)).conf.beat_schedule) == always
    periodic = Settings(home=tmp_path, train=TrainSettings(every_s=60.0))
    assert make_celery(periodic).conf.beat_schedule[RETRAIN]["schedule"] == 60.0


def test_the_embedded_broker_lives_under_home_and_redis_by_url(tmp_path: Path) -> None:
    embedded = Settings(home=tmp_path)
    prepare_broker(embedded)
    stale = tmp_path / "broker" / "queue" / "1_m1serve.msg"
    stale.write_text("{}")
    prepare_broker(embedded)
    assert not stale.exists()
    redis = Settings(home=tmp_path, score=ScoreSettings(broker_url="redis://localhost:1/0"))
    assert make_celery(redis).conf.broker_url == "redis://localhost:1/0"


@pytest.mark.parametrize(
    "name",
    ["score_job", "reap", "close_idle_sessions", "give_up_feedback", "erase_expired", "retrain"],
)
def test_tasks_are_registered_by_name(tmp_path: Path, name: str) -> None:
    assert f"m1serve.{name}" in make_celery(Settings(home=tmp_path)).tasks
