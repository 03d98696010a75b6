"""EngineReplica: an engine in a Ray Serve replica of its own, watching its target version.

Errors travel as values: a Failure is what RemoteEngine raises on the other side.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from ray import serve
from ray.serve import Application

from m1serve.config import Settings
from m1serve.engine.base import Engine
from m1serve.engine.launch import serving_device, start_best_engine, start_engine, tune_process
from m1serve.engine.watcher import VersionWatcher
from m1serve.errors import M1ServeError
from m1serve.store import Store
from m1serve.types import (
    Capabilities,
    Delta,
    EngineStats,
    GenerateRequest,
    Scored,
    Slot,
    Started,
    SwapReport,
    VersionRef,
)

GRACE_S = 7200.0
"""A stream may run for hours; Serve cuts what is longer than this when it stops a replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    error: M1ServeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    capabilities: Capabilities
    weights_version: str
    stats: EngineStats


def engine_app(
    settings: Settings, *, slot: Slot = Slot.STABLE, version: VersionRef | None = None
) -> Application:
    """The deployment; a given `version` is served as it is, without a store to follow."""
    engine = settings.engine
    deployment = serve.deployment(
        name=f"engine-{slot.value}",
        num_replicas=1,
        # every open stream counts; the engine's own queue is what refuses
        max_ongoing_requests=2 * (engine.num_slots + engine.max_waiting),
        graceful_shutdown_timeout_s=GRACE_S,
        graceful_shutdown_wait_loop_s=0.2,
        # Ray hides the GPUs from an actor that asks for none
        ray_actor_options={"num_cpus": 0, "num_gpus": int(_wants_gpu(settings))},
    )(EngineReplica)
    app: Application = deployment.bind(settings, slot, version)
    return app


def _wants_gpu(settings: Settings) -> bool:
    engine = settings.engine
    return engine.kind == "local" and serving_device(engine.device) == "cuda"


class EngineReplica:
    # Ray Serve awaits the constructor
    async def __init__(  # type: ignore[misc]
        self, settings: Settings, slot: Slot, version: VersionRef | None
    ) -> None:
        self._watching: asyncio.Task[None] | None = None
        if version is not None:
            self._engine = await asyncio.to_thread(_start, settings, version)
            return
        store = await asyncio.to_thread(Store.open, settings.database, migrate=False)
        self._engine = await asyncio.to_thread(_start_best, store, settings, slot)
        watcher = VersionWatcher(
            self._engine,
            store,
            model_id=settings.model.model_id,
            replica=_replica_name(),
            slot=slot,
            poll_s=settings.serve.poll_s,
        )
        self._watching = asyncio.create_task(watcher.run())

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Started | Delta | Failure]:
        items = cast(AsyncGenerator[Started | Delta, None], self._engine.generate(request))
        # Serve closes this generator when the caller goes away, and that must reach the engine
        async with aclosing(items):
            try:
                async for item in items:
                    yield item
            except M1ServeError as error:
                yield Failure(error=error)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def score(
        self, token_ids: tuple[int, ...], weights_version: str | None
    ) -> Scored | Failure:
        try:
            return await self._engine.score(token_ids, weights_version=weights_version)
        except M1ServeError as error:
            return Failure(error=error)

    async def load(self, version: VersionRef) -> SwapReport | Failure:
        try:
            return await self._engine.load(version)
        except M1ServeError as error:
            return Failure(error=error)

    async def describe(self) -> Description:
        return Description(
            capabilities=self._engine.capabilities,
            weights_version=self._engine.weights_version,
            stats=self._engine.stats(),
        )

    async def check_health(self) -> None:
        """Ray Serve restarts the replica when this raises."""
        self._engine.stats()
        if self._watching is not None and self._watching.done():
            self._watching.result()

    async def __del__(self) -> None:
        """Ray Serve awaits this when the replica has drained."""
        if self._watching is not None:
            self._watching.cancel()
        # after a constructor that raised there is none, and its error is the one to be read
        if hasattr(self, "_engine"):
            await self._engine.close()


def _start(settings: Settings, version: VersionRef) -> Engine:
    tune_process(settings)
    return start_engine(settings, version)


def _start_best(store: Store, settings: Settings, slot: Slot) -> Engine:
    tune_process(settings)
    return start_best_engine(store, settings, slot)


def _replica_name() -> str:
    """The same after a restart, so that a deployment row is replaced, not orphaned."""
    context = serve.get_replica_context()
    return f"{context.deployment}-{socket.gethostname()}-{context.rank.rank}"
