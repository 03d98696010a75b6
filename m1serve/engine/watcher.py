"""VersionWatcher: makes an engine serve what the store says it should, and reports what it did."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from m1serve.engine.base import Engine
from m1serve.errors import StoreError
from m1serve.types import Slot, SwapReport, VersionRef

logger = logging.getLogger(__name__)


class Targets(Protocol):
    def target(self, model_id: str, slot: Slot) -> VersionRef | None: ...

    def report_deployment(
        self, replica: str, slot: Slot, weights_version: str, report: SwapReport
    ) -> None: ...


class TargetStore(Protocol):
    @property
    def weights(self) -> Targets: ...


class VersionWatcher:
    """A version that was refused is not tried again until the target has changed; one that the
    engine has no room for yet is, at every look, and nothing is reported until it has.
    """

    def __init__(
        self,
        engine: Engine,
        store: TargetStore,
        *,
        model_id: str,
        replica: str,
        slot: Slot = Slot.STABLE,
        poll_s: float = 0.2,
    ) -> None:
        self._engine, self._weights = engine, store.weights
        self._model_id, self._replica, self._slot = model_id, replica, slot
        self._poll_s = poll_s
        self._settled: str | None = None
        """The target that was last loaded or refused."""
        self._deferred: str | None = None
        """The target that waits for room, once the log has it."""
        self._unreported: tuple[str, SwapReport] | None = None
        self._is_store_away = False

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._poll_s)

    async def look(self) -> None:
        """Once: swaps if the target has changed; a store that is away changes nothing."""
        try:
            target = await asyncio.to_thread(self._weights.target, self._model_id, self._slot)
            if target is not None and target.weights_version != self._settled:
                await self._settle(target)
            await self._report()
        except StoreError as error:
            if not self._is_store_away:
                logger.warning("the store is away, %s serves on: %s", self._replica, error)
            self._is_store_away = True
            return
        if self._is_store_away:
            logger.warning("the store is back for %s", self._replica)
        self._is_store_away = False

    async def _settle(self, target: VersionRef) -> None:
        report = await self._engine.load(target)
        if report.is_deferred:
            if self._deferred != target.weights_version:
                logger.warning(
                    "%s waits to be served by %s: %s",
                    target.weights_version,
                    self._replica,
                    report.reason,
                )
            self._deferred = target.weights_version
            return
        self._deferred = None
        logger.info(
            "replica=%s weights_version=%s accepted=%s reason=%s phases_ms=%s",
            self._replica,
            target.weights_version,
            report.is_accepted,
            report.reason,
            report.phases_ms,
        )
        self._settled = target.weights_version
        self._unreported = (target.weights_version, report)

    async def _report(self) -> None:
        """Again until the store has taken it."""
        if self._unreported is None:
            return
        weights_version, report = self._unreported
        await asyncio.to_thread(
            self._weights.report_deployment, self._replica, self._slot, weights_version, report
        )
        self._unreported = None
