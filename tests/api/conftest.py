"""A fake engine, a server on a loopback port and the real OpenAI client."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
import uvicorn
from openai import AsyncOpenAI
from starlette.types import ASGIApp

from m1serve.api import create_app
from m1serve.api.serving import Journal
from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import Settings
from m1serve.errors import RequestError, StoreError
from m1serve.store import Store
from m1serve.store.records import JournalRecord, TurnRecord, TurnsDelivered
from m1serve.types import (
    Capabilities,
    Delta,
    EngineStats,
    GenerateRequest,
    InFlight,
    Scored,
    Started,
    StopCause,
    SwapReport,
    TopLogprob,
    VersionRef,
)

EOS = "<end_of_sentence>"


class FakeEngine:
    """Says `replies` in turn, `step` tokens a delta, `delay_s` apart."""

    def __init__(self, tok: ChatTokenizer, *replies: str) -> None:
        self.tok = tok
        self.replies = list(replies or ["Hello."])
        self.say: Callable[[GenerateRequest], str] | None = None
        """Makes up a reply, in place of `replies`."""
        self.step = 3
        self.delay_s = 0.0
        self.before_start_s = 0.0
        self.failure: Exception | None = None
        self.fails_after: int | None = None
        self.raises_after: tuple[Exception, int] | None = None
        self.versions = ["fake@0"]
        self.requests: list[GenerateRequest] = []
        self.sent: dict[tuple[str, int], list[Delta]] = {}
        self.running: set[str] = set()
        self.aborted: set[str] = set()
        self.dead: Exception | None = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            max_model_len=4096,
            vocab_size=self.tok.vocab_size,
            max_top_logprobs=20,
            in_flight=frozenset(InFlight),
            has_prompt_logprobs=False,
            has_grammar=False,
            has_penalties=True,
            has_reasoning_budget=False,
        )

    @property
    def weights_version(self) -> str:
        return self.versions[-1]

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Started | Delta]:
        if self.failure is not None:
            raise self.failure
        self.requests.append(request)
        self.running.add(request.id)
        try:
            await asyncio.sleep(self.before_start_s)
            yield Started(cached_tokens=2, weights_version=self.versions[0])
            for choice in range(request.n):
                async for delta in self._choice(request, choice):
                    self.sent.setdefault((request.id, choice), []).append(delta)
                    yield delta
        finally:
            self.running.discard(request.id)

    async def _choice(self, request: GenerateRequest, choice: int) -> AsyncIterator[Delta]:
        if self.say is not None:
            text = self.say(request)
        else:
            text = self.replies[0] if len(self.replies) == 1 else self.replies.pop(0)
        ids = self.tok.encode_control(text + EOS)
        stop = StopCause.EOS
        if len(ids) > request.limits.max_tokens:
            ids, stop = ids[: request.limits.max_tokens], StopCause.LENGTH
        for place in range(0, len(ids), self.step):
            await asyncio.sleep(self.delay_s)
            if request.id in self.aborted:
                yield self._delta(request, choice, [], place, StopCause.ABORT)
                return
            if self.raises_after is not None and place >= self.raises_after[1]:
                raise self.raises_after[0]
            if self.fails_after is not None and place >= self.fails_after:
                yield self._delta(request, choice, [], place, StopCause.ERROR)
                return
            part = ids[place : place + self.step]
            is_last = place + self.step >= len(ids)
            yield self._delta(request, choice, part, place, stop if is_last else None)

    def _delta(
        self,
        request: GenerateRequest,
        choice: int,
        ids: Sequence[int],
        place: int,
        stop: StopCause | None,
    ) -> Delta:
        rows = [
            tuple(TopLogprob(token_id=i, logprob=-0.5) for i in range(request.top_logprobs))
            for _ in ids
        ]
        return Delta(
            choice=choice,
            token_ids=tuple(ids),
            logprobs=tuple(-0.001 * (place + n + 1) for n in range(len(ids))),
            token_flags=(1,) * len(ids),
            weights_version=self.versions[min(place // 12, len(self.versions) - 1)],
            top_logprobs=tuple(rows) if request.top_logprobs else (),
            stop=stop,
            stop_detail="a detail" if stop is StopCause.ERROR else None,
        )

    async def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)

    async def score(
        self, token_ids: Sequence[int], *, weights_version: str | None = None
    ) -> Scored:
        raise RequestError("the fake engine does not score")

    async def load(self, version: VersionRef) -> SwapReport:
        raise RequestError("the fake engine does not load")

    def stats(self) -> EngineStats:
        if self.dead is not None:
            raise self.dead
        return EngineStats(
            num_running=len(self.running),
            num_waiting=0,
            num_slots=8,
            versions=tuple(self.versions),
            sampled_tokens=0,
            prefilled_tokens=0,
            cached_tokens=0,
            num_swaps=0,
        )

    async def close(self) -> None:
        self.running.clear()


class Kept(list[JournalRecord]):
    """A journal in memory."""

    dropped = 0
    num_queued = 0
    is_alive = True

    def append(self, record: JournalRecord) -> None:
        """Turns of a delivery are marked, as the ledger does."""
        if not self.is_alive:
            raise StoreError("the journal is dead")
        if isinstance(record, TurnsDelivered):
            self[:] = [
                replace(r, was_delivered=True)
                if isinstance(r, TurnRecord) and r.turn_id in record.turn_ids
                else r
                for r in self
            ]
        else:
            super().append(record)

    def when_written(self, callback: Callable[[], None]) -> None:
        callback()


@dataclass
class World:
    """One server with what it was built from."""

    engine: FakeEngine
    journal: Kept
    url: str
    client: AsyncOpenAI
    settings: Settings = field(default_factory=Settings)

    @property
    def turns(self) -> list[TurnRecord]:
        return [record for record in self.journal if isinstance(record, TurnRecord)]

    @property
    def tok(self) -> ChatTokenizer:
        return self.engine.tok


Serve = Callable[..., AbstractAsyncContextManager[World]]


@asynccontextmanager
async def running(app: ASGIApp) -> AsyncIterator[str]:
    """The app behind uvicorn on a free loopback port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=1)
        # the parts of Server.serve and shutdown that do not sleep 0.1 s
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for listening in server.servers:
                listening.close()
            for connection in list(server.server_state.connections):
                connection.shutdown()
            await server.lifespan.shutdown()
            await asyncio.sleep(0)


@pytest.fixture(scope="session")
def tok() -> ChatTokenizer:
    return byte_tokenizer()


async def _eventually(condition: Callable[[], object], within_s: float = 2.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - any condition, no event behind it
            await asyncio.sleep(0.005)


@pytest.fixture
def eventually() -> Callable[..., Awaitable[None]]:
    """Waits until a condition holds."""
    return _eventually


@pytest.fixture
def serve(tok: ChatTokenizer) -> Serve:
    @asynccontextmanager
    async def serve(
        *replies: str,
        key: str = "any",
        is_behind_proxy: bool = False,
        tok: ChatTokenizer = tok,
        open_store: Callable[[], Store] | None = None,
        over: Any = None,
        into: Journal | None = None,
        **sections: object,
    ) -> AsyncIterator[World]:
        settings = Settings(
            **{"model": {"model_id": "fake", "aliases": ["m1/alias"]}, **sections}  # type: ignore[arg-type]
        )
        engine, kept = over or FakeEngine(tok, *replies), Kept()
        app = create_app(
            engine,
            into or kept,
            settings,
            tok,
            is_behind_proxy=is_behind_proxy,
            open_store=open_store,
        )
        async with (
            running(app) as url,
            # loading certificates takes longer than most tests
            httpx.AsyncClient(verify=False) as http,
        ):
            client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=http)
            yield World(engine, kept, url, client, settings)

    return serve
