"""What every route needs, built once in create_app and passed in."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import anyio

from m1serve.api.defaults import AnswerDefaults
from m1serve.api.keys import KeyRing
from m1serve.api.ledger_reader import LedgerReader
from m1serve.api.session_index import SessionIndex
from m1serve.chat.history import HistoryIndex
from m1serve.chat.template import template_digest
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import Settings
from m1serve.engine.base import Engine
from m1serve.errors import OverloadedError, RequestError, StoreError
from m1serve.metrics import Metrics
from m1serve.store.records import JournalRecord

logger = logging.getLogger(__name__)

WRITE_WAIT_S = 3.0
"""A disk that hangs for longer holds up no answer."""
JOURNAL_DEAD = (
    "the journal of this server is dead and nothing can be recorded (its log has the reason): "
    "restart the server; until then only requests with x-m1-mode: off are served"
)


class Journal(Protocol):
    """JournalWriter, or something in memory."""

    @property
    def dropped(self) -> int: ...

    @property
    def num_queued(self) -> int: ...

    @property
    def is_alive(self) -> bool:
        """False when it will never keep a record again."""
        ...

    def append(self, record: JournalRecord, /) -> object:
        """Returns at once; the record is on disk soon. StoreError when it is dead."""
        ...

    def when_written(self, callback: Callable[[], None], /) -> None:
        """Calls back, from any thread, once what was appended before outlives this process."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    engine: Engine
    journal: Journal
    settings: Settings
    tokenizer: ChatTokenizer
    history: HistoryIndex
    sessions: SessionIndex
    keys: KeyRing
    ledger: LedgerReader
    metrics: Metrics
    defaults: Mapping[str, AnswerDefaults]
    """By name that `model` may carry, the model's own first."""
    numerics_digest: str
    template_digest: str = field(default_factory=template_digest)
    started_at: float = field(default_factory=time.time)
    threads: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(2))
    """For parsing and rendering large bodies beside the event loop."""

    @property
    def names(self) -> tuple[str, ...]:
        """What `model` may say."""
        return tuple(self.defaults)

    def require_capture(self) -> None:
        """Nothing that has to be recorded is served when it cannot be: StoreError, a 503."""
        if not self.journal.is_alive:
            raise StoreError(JOURNAL_DEAD)

    async def written(self) -> None:
        """Before anything is acknowledged: what was journalled so far survives a kill from here."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(done.set)

        self.journal.when_written(tell)
        try:
            async with asyncio.timeout(WRITE_WAIT_S):
                await done.wait()
        except TimeoutError:
            self.require_capture()
            logger.error("the journal's disk does not answer; a crash now would lose turns")

    async def journalled(self, record: JournalRecord) -> None:
        """For what is nothing but a record: OverloadedError, a 503, when it may have been dropped.
        Sent again it counts once.
        """
        before = self.journal.dropped
        self.journal.append(record)
        await self.written()
        if self.journal.dropped > before:
            raise OverloadedError("the journal is full and this was not kept; send it again")

    def defaults_of(self, name: str) -> AnswerDefaults:
        """Raises RequestError, a 404, for a name that is not served."""
        found = self.defaults.get(name)
        if found is None:
            raise RequestError(
                f"model {name!r} is not served here; served are {', '.join(self.names)}",
                param="model",
                code="model_not_found",
                status=404,
            )
        return found
