"""The Engine contract. Every implementation passes the suite in tests/engine/test_contract.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from m1serve.types import (
    Capabilities,
    Delta,
    EngineStats,
    GenerateRequest,
    Scored,
    Started,
    SwapReport,
    VersionRef,
)


class Engine(Protocol):
    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def weights_version(self) -> str:
        """The version that new requests get."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Started | Delta]:
        """Yields one `Started`, then deltas until every choice had one with `stop` set.

        Closing the iterator aborts the request and frees its slots.
        Raises RequestError for what the engine cannot do (prompt too long, unknown pin) and
        OverloadedError when its queue is full, both before `Started`. A failure while running ends
        every choice with StopCause.ERROR.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Ends the request's choices with StopCause.ABORT within one step; unknown ids pass."""
        ...

    async def score(
        self, token_ids: Sequence[int], *, weights_version: str | None = None
    ) -> Scored:
        """Teacher-forced logprobs under the same numerics as decode."""
        ...

    async def load(self, version: VersionRef) -> SwapReport:
        """Stages, verifies (checksums, golden logprobs) and switches.

        Refusal leaves the old version serving. Running requests finish on the weights they began
        with unless their `in_flight` says otherwise, and those weights are held until then. While
        settings.engine.max_held_versions are held, a further one is not even read: its report
        `is_deferred`, and the same load works once the oldest has drained.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Aborts what runs and frees the device."""
        ...
