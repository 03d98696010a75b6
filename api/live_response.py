"""Sends an answer while it is generated, keeps the connection alive, sees the client leave.

Engine errors before the first byte become ordinary error responses; after it, an error object.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Protocol

import anyio
import anyio.to_thread
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from m1serve.api.choice import ChoiceStream
from m1serve.api.chunks import KEEP_ALIVE, sse
from m1serve.api.errors import error_body, error_response
from m1serve.api.exchange import Exchange
from m1serve.api.exchange_batch import ExchangeBatch
from m1serve.chat.reply import ReplyEvent
from m1serve.errors import M1ServeError
from m1serve.types import Started

logger = logging.getLogger(__name__)

ABORT_WAIT_S = 1.0
"""How long the engine may take to hand over what an aborted request had sampled."""
LARGE_ANSWER_LOGPROBS = 4096
LARGE_PROMPT = 65_536
"""From here on writing them takes tens of milliseconds, which would hold up other streams."""


class _ClientGone(Exception):
    pass


class StreamWriter(Protocol):
    def started(self) -> bytes:
        """After each `Started`."""
        ...

    def step(self, choice: ChoiceStream, events: list[ReplyEvent], /) -> bytes: ...

    def end(self) -> bytes: ...


class LiveResponse(Response):
    """Owns the exchange: generates, sends and settles it.

    `writer` makes the events of a stream, `body` the whole answer of an exchange that has ended.
    """

    def __init__(
        self,
        exchange: Exchange | ExchangeBatch,
        *,
        writer: Callable[[], StreamWriter],
        body: Callable[[], bytes],
    ) -> None:
        self._exchange, self._new_writer, self._new_body = exchange, writer, body
        self._is_stream = exchange.prepared.is_stream
        self._keep_alive_s = exchange.serving.settings.serve.keep_alive_s
        self._is_begun = False
        self._sent_at = 0.0
        self._sending = asyncio.Lock()
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._exchange.serving.metrics.open_responses.track_inprogress():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, receive, tasks.cancel_scope)
                tasks.start_soon(self._keep_alive, send)
                await self._deliver_and_settle(scope, receive, send)
                tasks.cancel_scope.cancel()

    async def _deliver_and_settle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Settles in the same step as the last byte: the client's next words come after it."""
        was_delivered = False
        try:
            was_delivered = await self._deliver(scope, receive, send)
        finally:
            is_gone = self._exchange.is_client_gone
            self._exchange.settle(was_delivered=was_delivered and not is_gone)

    async def _deliver(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Returns whether the whole answer was handed over."""
        try:
            await (self._send_stream(send) if self._is_stream else self._send_body(send))
        except _ClientGone:
            self._exchange.is_client_gone = True
            return False
        except Exception as error:  # noqa: BLE001 - the HTTP edge: logs, tells the client
            self._log(error)
            if not self._is_begun:
                self._is_begun = True
                await self._refuse(error, scope, receive, send)
            else:
                value = {"error": error_body(error)}
                last = sse(value) if self._is_stream else json.dumps(value).encode()
                await self._send(send, last, is_last=True)
            return False
        return True

    async def _send_stream(self, send: Send) -> None:
        writer = self._new_writer()
        async with aclosing(self._exchange.steps()) as steps:
            async for step in steps:
                if isinstance(step, Started):
                    await self._send(send, await self._beside(writer.started))
                elif data := writer.step(step.choice, step.events):
                    if self._exchange.has_ended:
                        # some clients stop reading at the finish reason
                        await self._exchange.keep()
                    await self._send(send, data)
        await self._send(send, writer.end(), is_last=True)

    async def _send_body(self, send: Send) -> None:
        async with aclosing(self._exchange.steps()) as steps:
            async for _ in steps:
                pass
        await self._exchange.keep()
        await self._send(send, await self._body(), is_last=True)

    async def _body(self) -> bytes:
        if self._exchange.num_shown_logprobs < LARGE_ANSWER_LOGPROBS:
            return await self._beside(self._new_body)
        return await self._in_thread(self._new_body)

    async def _beside(self, write: Callable[[], bytes]) -> bytes:
        """In a thread where a large prompt is written too."""
        if self._exchange.num_shown_prompt < LARGE_PROMPT:
            return write()
        return await self._in_thread(write)

    async def _in_thread(self, write: Callable[[], bytes]) -> bytes:
        threads = self._exchange.serving.threads
        return await anyio.to_thread.run_sync(write, limiter=threads)

    async def _watch(self, receive: Receive, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await self._exchange.abort()
        await anyio.sleep(ABORT_WAIT_S)
        scope.cancel()

    async def _keep_alive(self, send: Send) -> None:
        """Comments between events; spaces before a body, which JSON allows."""
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        while True:
            wait_s = self._sent_at + self._keep_alive_s - loop.time()
            if wait_s > 0:
                await anyio.sleep(wait_s)
                continue
            try:
                await self._send(send, KEEP_ALIVE if self._is_stream else b" ")
            except _ClientGone:
                await self._exchange.abort()
                return

    async def _send(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        async with self._sending:
            try:
                if not self._is_begun:
                    self._is_begun = True
                    headers = self._head(len(data) if is_last else None)
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": data, "more_body": not is_last})
            except OSError:
                # uvicorn's word for a client that hung up
                raise _ClientGone from None
            self._sent_at = asyncio.get_running_loop().time()

    def _head(self, size: int | None) -> list[tuple[bytes, bytes]]:
        turn_ids = ",".join(choice.turn_id for choice in self._exchange.choices)
        content_type = "text/event-stream; charset=utf-8" if self._is_stream else "application/json"
        headers = {
            "content-type": content_type,
            "cache-control": "no-store",
            "x-accel-buffering": "no",
            "x-m1-session-id": self._exchange.session_id,
            "x-m1-turn-id": turn_ids,
            "x-m1-weights-version": self._exchange.weights_version,
        }
        if size is not None:
            headers["content-length"] = str(size)
        return [(name.encode(), value.encode()) for name, value in headers.items()]

    async def _refuse(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        response = error_response(error)
        response.headers["x-m1-session-id"] = self._exchange.session_id
        await response(scope, receive, send)

    def _log(self, error: Exception) -> None:
        request_id = self._exchange.prepared.request_id
        if isinstance(error, M1ServeError):
            logger.warning("request %s ended early: %s", request_id, error)
        else:
            logger.error("request %s failed", request_id, exc_info=error)
