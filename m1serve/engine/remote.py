"""RemoteEngine: the Engine protocol over a Ray Serve handle to EngineReplicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar, cast

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from m1serve.engine.replica import Description, Failure
from m1serve.errors import EngineAwayError, EngineError
from m1serve.types import (
    Capabilities,
    Delta,
    EngineStats,
    GenerateRequest,
    Scored,
    Started,
    StopCause,
    SwapReport,
    VersionRef,
)

logger = logging.getLogger(__name__)

REFRESH_S = 0.5
RAY_ERRORS = (RayError, RayServeException)

T = TypeVar("T")


class RemoteEngine:
    """Build it with `RemoteEngine.connect`; close it to stop its refreshing, the replicas go on."""

    def __init__(self, handle: DeploymentHandle[Any], description: Description) -> None:
        self._handle = handle
        self._streams = handle.options(stream=True)
        self._description = description
        self._refreshing = asyncio.create_task(self._refresh_for_ever())

    @classmethod
    async def connect(cls, handle: DeploymentHandle[Any]) -> RemoteEngine:
        """Waits for a replica to answer."""
        return cls(handle, await _answer(handle.describe.remote()))

    @property
    def capabilities(self) -> Capabilities:
        return self._description.capabilities

    @property
    def weights_version(self) -> str:
        """As of the last refresh."""
        return self._description.weights_version

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Started | Delta]:
        stream = cast(
            DeploymentResponseGenerator[Started | Delta | Failure],
            self._streams.generate.remote(request),
        )
        is_started, open_choices = False, set(range(request.n))
        version = self.weights_version
        try:
            async for item in stream:
                if isinstance(item, Failure):
                    raise item.error
                if isinstance(item, Started):
                    is_started, version = True, item.weights_version
                elif item.stop is not None:
                    open_choices.discard(item.choice)
                yield item
            if open_choices:
                raise EngineError(f"the replica ended the stream of {request.id} half-way")
        except RAY_ERRORS as error:
            if not is_started:
                raise _unavailable(error) from error
            logger.warning("request_id=%s lost its replica: %s", request.id, error)
            for choice in sorted(open_choices):
                yield _cut_off(choice, version, error)
            open_choices.clear()
        finally:
            if open_choices:
                stream.cancel()  # type: ignore[no-untyped-call]

    async def abort(self, request_id: str) -> None:
        """Asks every replica: only one of them knows the id."""
        try:
            await self._handle.broadcast("abort", request_id).results_async()
        except RAY_ERRORS as error:
            raise _unavailable(error) from error

    async def score(
        self, token_ids: Sequence[int], *, weights_version: str | None = None
    ) -> Scored:
        response = self._handle.score.remote(tuple(token_ids), weights_version)
        scored: Scored = await _answer(response)
        return scored

    async def load(self, version: VersionRef) -> SwapReport:
        """On every replica; the report of one that refused or has no room yet, if any did."""
        try:
            answers = await self._handle.broadcast("load", version).results_async()
        except RAY_ERRORS as error:
            raise _unavailable(error) from error
        reports: list[SwapReport] = [_unwrapped(answer) for answer in answers]
        if not reports:
            raise EngineError("no engine replica is running; wait for one and load again")
        await self.refresh()
        return min(reports, key=lambda report: (report.is_accepted, report.is_deferred))

    def stats(self) -> EngineStats:
        """Of one replica, as of the last refresh."""
        return self._description.stats

    async def refresh(self) -> None:
        self._description = await _answer(self._handle.describe.remote())

    async def close(self) -> None:
        self._refreshing.cancel()
        await asyncio.gather(self._refreshing, return_exceptions=True)

    async def _refresh_for_ever(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self.refresh()
            except EngineError as error:
                logger.warning("the engine cannot be asked how it is: %s", error)


async def _answer(response: Any) -> Any:  # noqa: ANN401 - what Ray gives is not typed
    try:
        return _unwrapped(await response)
    except RAY_ERRORS as error:
        raise _unavailable(error) from error


def _unwrapped(answer: T | Failure) -> T:
    if isinstance(answer, Failure):
        raise answer.error
    return answer


def _unavailable(error: Exception) -> EngineAwayError:
    return EngineAwayError(f"no engine replica can answer ({type(error).__name__}: {error})")


def _cut_off(choice: int, weights_version: str, error: Exception) -> Delta:
    return Delta(
        choice=choice,
        token_ids=(),
        logprobs=(),
        token_flags=(),
        weights_version=weights_version,
        stop=StopCause.ERROR,
        stop_detail=f"the engine replica was lost ({type(error).__name__})",
    )
