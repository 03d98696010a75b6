"""The trainer process: takes requested runs one after the other, until told to stop.

Not a Celery task: a run may take hours. It heartbeats its row; a trainer that dies leaves a run
whose lease runs out, and the next one resumes it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import Settings
from m1serve.engine.base import Engine
from m1serve.engine.local import LocalEngine
from m1serve.errors import FencedError, StoreError
from m1serve.online_rl.cycle import run_cycle
from m1serve.online_rl.examiner import Examiner
from m1serve.online_rl.scorers.sandbox import Sandbox
from m1serve.online_rl.suite import first_look
from m1serve.online_rl.workshop import Workshop
from m1serve.store import Store
from m1serve.store.run_views import RunLease
from m1serve.types import VersionRef

HEARTBEATS_A_LEASE = 5
IDLE_S = 0.5
logger = logging.getLogger(__name__)


def run_trainer(settings: Settings, stop: threading.Event) -> None:
    """Blocks until `stop` is set; a run in progress is then left for the next trainer to resume."""
    tok = ChatTokenizer.load(settings.model_dir)
    # families that do not exist are refused now, not after an hour of training
    first_look(settings.gate)
    owner = f"{socket.gethostname()}:{os.getpid()}"
    score = settings.score
    store = Store.open(settings.database)
    with Sandbox(timeout_s=score.timeout_s, memory_bytes=score.memory_bytes) as sandbox:
        trainer = Trainer(store=store, settings=settings, tok=tok, sandbox=sandbox, owner=owner)
        try:
            while not stop.is_set():
                if not trainer.work_once(stop):
                    stop.wait(IDLE_S)
        finally:
            store.close()


class Trainer:
    def __init__(
        self,
        *,
        store: Store,
        settings: Settings,
        tok: ChatTokenizer,
        sandbox: Sandbox,
        owner: str,
    ) -> None:
        self.store, self.settings, self.owner = store, settings, owner
        self.heartbeat_s = settings.train.lease_s / HEARTBEATS_A_LEASE
        self.examiner = Examiner(
            store=store,
            tok=tok,
            sandbox=sandbox,
            gate=settings.gate,
            start_engine=self.start_engine,
        )
        self._tok = tok

    async def start_engine(self, version: VersionRef) -> Engine:
        # a second thread gains decoding little, and stalls it when the cores are shared
        torch.set_num_threads(self.settings.engine.num_threads)
        return LocalEngine.start(version, settings=self.settings.engine, tokenizer=self._tok)

    def work_once(self, stop: threading.Event) -> bool:
        """Claims a run and brings it to an end; False when there was none, or no store."""
        try:
            lease = self.store.runs.claim_next(self.owner, self.settings.train.lease_s)
        except StoreError as error:
            logger.warning("no run can be claimed, trying again: %s", error)
            return False
        if lease is None:
            return False
        logger.info("run_id=%s fence=%d phase=%s claimed", lease.run_id, lease.fence, lease.phase)
        with self.heartbeat(lease, stop) as is_lost, num_threads(self.settings.train.num_threads):
            self._run(lease, is_lost)
        return True

    def _run(self, lease: RunLease, is_lost: threading.Event) -> None:
        shop: Workshop | None = None
        try:
            shop = Workshop(
                store=self.store,
                settings=self.settings,
                lease=lease,
                examiner=self.examiner,
                is_lost=is_lost,
            )
            run_cycle(shop)
        except FencedError as error:
            logger.warning("run_id=%s dropped: %s", lease.run_id, error)
        except Exception as error:
            logger.exception("run_id=%s failed", lease.run_id)
            self._fail(lease, shop, f"{type(error).__name__}: {error}")

    def _fail(self, lease: RunLease, shop: Workshop | None, reason: str) -> None:
        try:
            if shop is not None:
                shop.fail(reason)
            else:
                self.store.runs.finish(lease.run_id, lease.token, "failed", reason, {})
        except StoreError as error:
            logger.warning("run_id=%s stays for its lease to run out: %s", lease.run_id, error)

    @contextmanager
    def heartbeat(self, lease: RunLease, stop: threading.Event) -> Iterator[threading.Event]:
        """Keeps the lease from a thread; sets the yielded event when it is lost or we must stop."""
        is_lost, is_over = threading.Event(), threading.Event()

        def beat() -> None:
            while not is_over.wait(self.heartbeat_s):
                if stop.is_set():
                    is_lost.set()
                    return
                try:
                    self.store.runs.heartbeat(lease.run_id, lease.token)
                except FencedError:
                    is_lost.set()
                    return
                except StoreError as error:
                    logger.warning("run_id=%s heartbeat missed: %s", lease.run_id, error)

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield is_lost
        finally:
            is_over.set()
            thread.join()


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Torch threads for the time of a run; an idle trainer holds one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
