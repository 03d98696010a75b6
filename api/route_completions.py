"""POST /v1/completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from m1serve.api.exchange import Exchange
from m1serve.api.exchange_batch import ExchangeBatch
from m1serve.api.live_response import LiveResponse
from m1serve.api.prepare_completion import prepare_completion
from m1serve.api.route_chat import json_body, take_in
from m1serve.api.schema import CompletionRequest
from m1serve.api.serving import Serving
from m1serve.api.text_completion import TextChunkWriter, text_completion_body


def completions_router(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/completions",
        response_class=Response,
        openapi_extra=json_body(CompletionRequest.model_json_schema()),
    )
    async def completions(request: Request) -> Response:
        prepared = await take_in(serving, request, prepare_completion)
        batch = ExchangeBatch([Exchange(serving, one) for one in prepared])
        return LiveResponse(
            batch,
            writer=partial(TextChunkWriter, batch),
            body=partial(text_completion_body, batch),
        )

    return router
