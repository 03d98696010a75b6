"""Celery delivers job ids, nothing else: rows say what is due, who holds it and what came of it.

The only file that knows Celery. Messages may be lost, repeated or purged at any time; beat's reaper
sends again what is due. Run it with `run_worker(settings)`, which blocks until SIGTERM.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery
from celery.beat import EmbeddedService, Scheduler
from celery.platforms import SecurityWarning

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import Settings
from m1serve.errors import StoreError
from m1serve.online_rl.scorers.sandbox import Sandbox
from m1serve.online_rl.scoring import score_job
from m1serve.store import Store
from m1serve.store.jobs import SCORE

QUEUE = "m1serve"
SCORE_JOB = "m1serve.score_job"
REAP = "m1serve.reap"
CLOSE_IDLE = "m1serve.close_idle_sessions"
GIVE_UP_FEEDBACK = "m1serve.give_up_feedback"
RETRAIN = "m1serve.retrain"
ERASE_EXPIRED = "m1serve.erase_expired"
FILE_TRANSPORT = "m1serve.online_rl.file_broker:Transport"
POLL_S = 0.05
PREFETCH = 8
"""The file transport sleeps for POLL_S when it may take no more: 1 caps it at 20 jobs a second."""
CLOSE_IDLE_S = 5.0
GIVE_UP_FEEDBACK_S = 30.0
ERASE_EXPIRED_S = 30.0
RESEND_S = 30.0
"""A job that was sent and not begun for this long is sent again."""
TASK_LIMIT_S = 600
"""No task body runs longer, so that no broker redelivers a healthy one."""
logger = logging.getLogger(__name__)


class ScoreWorker:
    """What the task bodies share in one worker process; a sandbox for each thread."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._local = threading.local()
        self._store: Store | None = None
        self._tok: ChatTokenizer | None = None
        self._sandboxes: list[Sandbox] = []

    @property
    def store(self) -> Store:
        with self._lock:
            if self._store is None:
                self._store = Store.open(
                    self.settings.database, job_max_attempts=self.settings.score.max_attempts
                )
            return self._store

    @property
    def tokenizer(self) -> ChatTokenizer:
        with self._lock:
            if self._tok is None:
                self._tok = ChatTokenizer.load(self.settings.model_dir)
            return self._tok

    @property
    def sandbox(self) -> Sandbox:
        score = self.settings.score
        if not hasattr(self._local, "sandbox"):
            self._local.sandbox = Sandbox(
                timeout_s=score.timeout_s, memory_bytes=score.memory_bytes
            )
            with self._lock:
                self._sandboxes.append(self._local.sandbox)
        sandbox: Sandbox = self._local.sandbox
        return sandbox

    def score(self, job_id: str) -> bool:
        return score_job(self.store, self.tokenizer, self.sandbox, job_id, self.settings.score)

    def reap(self, send: Callable[[str], None], *, resend_s: float = RESEND_S) -> int:
        """Sends every due job; sending before marking costs a duplicate at worst, never a job."""
        due = [
            job.job_id
            for job in self.store.jobs.due(time.time(), resend_s=resend_s)
            if job.kind == SCORE
        ]
        for job_id in due:
            send(job_id)
        if due:
            self.store.jobs.mark_sent(due)
        return len(due)

    def close_idle_sessions(self) -> int:
        return self.store.ledger.close_idle_sessions(
            self.settings.serve.session_idle_s, time.time()
        )

    def give_up_feedback(self) -> int:
        settings = self.settings
        wait_s = settings.score.feedback_wait_s
        return self.store.ledger.give_up_feedback(settings.model.model_id, wait_s)

    def erase_expired(self) -> int:
        days = self.settings.serve.retention_days
        return self.store.ledger.erase_expired(None if days is None else days * 86_400)

    def retrain(self) -> str:
        return self.store.runs.request(self.settings.model.model_id, "schedule", {})

    def close(self) -> None:
        for sandbox in self._sandboxes:
            sandbox.close()
        if self._store is not None:
            self._store.close()


def make_celery(settings: Settings, worker: ScoreWorker | None = None) -> Celery:
    """The app with its tasks and beat entries; nothing is opened or connected yet."""
    worker = worker or ScoreWorker(settings)
    app = Celery("m1serve", set_as_current=False)
    app.conf.update(
        broker_url=settings.score.broker_url or "filesystem://",
        broker_transport=None if settings.score.broker_url else FILE_TRANSPORT,
        broker_transport_options=_transport_options(settings),
        broker_connection_retry_on_startup=True,
        task_default_queue=QUEUE,
        task_serializer="json",
        accept_content=["json"],
        result_backend=None,
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=PREFETCH,
        worker_enable_remote_control=False,
        worker_hijack_root_logger=False,
        worker_send_task_events=False,
        beat_schedule=_beat_schedule(settings),
        enable_utc=True,
    )
    _add_tasks(app, worker)
    return app


def run_worker(settings: Settings) -> int:
    """Worker and beat in this process until SIGTERM or SIGINT; returns the exit code. Main thread
    only.
    """
    prepare_broker(settings)
    # about root and pickle; only JSON is accepted here
    warnings.filterwarnings("ignore", category=SecurityWarning)
    shared = ScoreWorker(settings)
    app = make_celery(settings, shared)
    beat = EmbeddedService(app, thread=True, scheduler_cls=Scheduler)
    worker = app.Worker(
        pool="threads",
        concurrency=settings.score.concurrency,
        loglevel="WARNING",
        quiet=True,
        without_mingle=True,
        without_gossip=True,
        without_heartbeat=True,
    )
    try:
        # what an earlier worker had been sent went with its broker
        shared.reap(partial(_send_score_job, app), resend_s=0.0)
        beat.start()
        worker.start()
    finally:
        beat.stop()
        shared.close()
    return int(worker.exitcode or 0)


def prepare_broker(settings: Settings) -> None:
    """Makes the embedded transport's folders and drops what an earlier worker left; the rows
    remember.
    """
    if settings.score.broker_url is not None:
        return
    for folder in _folders(settings):
        folder.mkdir(parents=True, exist_ok=True)
        for message in folder.iterdir():
            message.unlink(missing_ok=True)


def _send_score_job(app: Celery, job_id: str) -> None:
    app.send_task(SCORE_JOB, args=[job_id])


def _add_tasks(app: Celery, worker: ScoreWorker) -> None:
    bodies: dict[str, Callable[..., object]] = {
        SCORE_JOB: lambda job_id: worker.score(job_id),
        REAP: lambda: worker.reap(partial(_send_score_job, app)),
        CLOSE_IDLE: worker.close_idle_sessions,
        GIVE_UP_FEEDBACK: worker.give_up_feedback,
        ERASE_EXPIRED: worker.erase_expired,
        RETRAIN: worker.retrain,
    }
    for name, body in bodies.items():
        app.task(name=name, shared=False)(_edge(name, body))


def _edge(name: str, body: Callable[..., object]) -> Callable[..., object]:
    """A store that is away for a moment is logged in one line; the reaper comes again."""

    def run(*args: object) -> object:
        try:
            return body(*args)
        except StoreError as error:
            logger.warning("task=%s store unavailable: %s", name, error)
            return None

    run.__name__ = name.rpartition(".")[2]
    return run


def _beat_schedule(settings: Settings) -> dict[str, dict[str, Any]]:
    periods = {
        REAP: settings.score.reap_s,
        CLOSE_IDLE: CLOSE_IDLE_S,
        GIVE_UP_FEEDBACK: GIVE_UP_FEEDBACK_S,
        ERASE_EXPIRED: ERASE_EXPIRED_S,
    }
    if settings.train.every_s is not None:
        periods[RETRAIN] = settings.train.every_s
    return {
        # a busy worker must not find a hundred of them afterwards
        name: {"task": name, "schedule": period, "options": {"expires": max(period, 5.0)}}
        for name, period in periods.items()
    }


def _transport_options(settings: Settings) -> dict[str, object]:
    if settings.score.broker_url is not None:
        return {"visibility_timeout": TASK_LIMIT_S + 300}
    queue, control = (str(folder) for folder in _folders(settings))
    return {
        "data_folder_in": queue,
        "data_folder_out": queue,
        "control_folder": control,
        "store_processed": False,
        "polling_interval": POLL_S,
    }


def _folders(settings: Settings) -> tuple[Path, Path]:
    broker = settings.home.resolve() / "broker"
    return broker / "queue", broker / "control"
