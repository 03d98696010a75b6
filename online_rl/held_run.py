"""A run that is ours for as long as its lease holds: phases, waiting, and its end."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from m1serve.errors import FencedError, StoreError
from m1serve.online_rl.run_metrics import finite
from m1serve.store import Store
from m1serve.store.run_views import RunLease, RunView
from m1serve.store.runs import Outcome
from m1serve.store.versions import WeightsVersion
from m1serve.types import VersionState

LOOK_S = 0.2
"""How often a long wait looks whether the lease is still there."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class HeldRun:
    """Rows are written under the lease only; FencedError means: drop everything, write nothing."""

    store: Store
    lease: RunLease
    is_lost: threading.Event = field(default_factory=threading.Event)
    """Set by whoever heartbeats, when the lease is gone or the process must stop."""

    def enter(self, phase: str) -> None:
        """Marks the row; FencedError when somebody else holds the run by now."""
        self._check_lease()
        logger.info("run_id=%s phase=%s", self.lease.run_id, phase)
        self.store.runs.set_phase(self.lease.run_id, self.lease.token, phase)

    def while_leased(self, items: Sequence[T]) -> Iterator[T]:
        """The items, until the lease is lost; long loops go through here."""
        for item in items:
            self._check_lease()
            yield item

    def run(self) -> RunView:
        run = self.store.runs.get(self.lease.run_id)
        if run is None:
            raise StoreError(f"run {self.lease.run_id} is gone from the ledger")
        return run

    def candidate(self) -> WeightsVersion | None:
        """What this run committed, if it did."""
        name = self.run().weights_version
        return None if name is None else self.store.weights.get(name)

    def candidate_state(self) -> VersionState:
        return self.committed().state

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it to its end, or cancels it when the lease is lost."""

        async def watched() -> T:
            task = asyncio.ensure_future(work)
            while not task.done() and not self.is_lost.is_set():
                await asyncio.wait({task}, timeout=LOOK_S)
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
                self._check_lease()
            return task.result()

        return asyncio.run(watched())

    def committed(self) -> WeightsVersion:
        version = self.candidate()
        if version is None:
            raise StoreError(f"run {self.lease.run_id} has no committed version")
        return version

    def end(self, outcome: Outcome, reason: str, metrics: Mapping[str, float]) -> Outcome:
        self.store.runs.finish(
            self.lease.run_id, self.lease.token, outcome, reason, finite(metrics)
        )
        logger.info("run_id=%s outcome=%s %s", self.lease.run_id, outcome, reason)
        return outcome

    def _check_lease(self) -> None:
        if self.is_lost.is_set():
            raise FencedError(f"run {self.lease.run_id} was taken over, or its trainer must stop")
