"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

import anyio.to_thread
from fastapi import APIRouter, Request
from starlette.responses import Response

from m1serve.api.body import read_body
from m1serve.api.chunks import ChunkWriter
from m1serve.api.completion import completion_body
from m1serve.api.exchange import Exchange
from m1serve.api.identity import Caller
from m1serve.api.keys import Scope
from m1serve.api.live_response import LiveResponse
from m1serve.api.prepare import Prepared, prepare
from m1serve.api.schema import ChatRequest
from m1serve.api.serving import Serving
from m1serve.types import Mode

Taken = TypeVar("Taken", Prepared, tuple[Prepared, ...], covariant=True)


class Prepare(Protocol[Taken]):
    def __call__(
        self,
        serving: Serving,
        body: bytes,
        headers: Mapping[str, str],
        *,
        caller: Caller,
        request_id: str,
        created_at: float,
    ) -> Taken: ...


LARGE_BODY_BYTES = 64 * 2**10
"""From here on parsing and rendering would hold up the streams of others."""


def chat_router(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        response_class=Response,
        openapi_extra=json_body(ChatRequest.model_json_schema()),
    )
    async def chat_completions(request: Request) -> Response:
        exchange = Exchange(serving, await take_in(serving, request, prepare))
        return LiveResponse(
            exchange,
            writer=partial(ChunkWriter, exchange),
            body=partial(completion_body, exchange),
        )

    return router


async def take_in(serving: Serving, request: Request, prepare: Prepare[Taken]) -> Taken:
    """Who asks, what they sent, and whether it can be recorded; large bodies beside the loop."""
    created_at = time.time()
    caller = serving.keys.caller(request.headers.get("authorization"), Scope.INFER)
    body = await read_body(request)
    work = partial(
        prepare,
        serving,
        body,
        request.headers,
        caller=caller,
        request_id=request.state.request_id,
        created_at=created_at,
    )
    if len(body) < LARGE_BODY_BYTES:
        prepared = work()
    else:
        prepared = await anyio.to_thread.run_sync(work, limiter=serving.threads)
    first = prepared if isinstance(prepared, Prepared) else prepared[0]
    if first.labels.mode is not Mode.OFF:
        serving.require_capture()
    return prepared


def json_body(schema: dict[str, Any]) -> dict[str, Any]:
    """For the OpenAPI page: bodies are parsed by us, with OpenAI's errors."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
