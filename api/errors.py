"""Errors in OpenAI's shape: what, got, wanted; retried only when a retry can help."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from m1serve.errors import (
    EngineAwayError,
    EngineError,
    M1ServeError,
    OverloadedError,
    RequestError,
    StoreError,
)

logger = logging.getLogger(__name__)

AWAY_RETRY_S = 2
"""A replica that was lost is back after some seconds; so is a store, as a rule."""


def error_body(error: BaseException) -> dict[str, object]:
    """The value of `error` in a body or an SSE event."""
    status = error_status(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    if isinstance(error, RequestError):
        return {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.code,
        }
    if isinstance(error, M1ServeError):
        return {"message": str(error), "type": kind, "param": None, "code": _code(error)}
    # whatever else it was may tell about the machine: it goes to the log only
    message = "The server failed on this request; its log has the details under x-request-id."
    return {"message": message, "type": kind, "param": None, "code": "internal_error"}


def _code(error: M1ServeError) -> str:
    if isinstance(error, EngineAwayError):
        return "engine_away"
    if isinstance(error, StoreError):
        return "store_error"
    return "engine_error" if isinstance(error, EngineError) else "internal_error"


def error_status(error: BaseException) -> int:
    if isinstance(error, RequestError):
        return error.status
    return 503 if isinstance(error, EngineAwayError | StoreError) else 500


def error_response(error: BaseException) -> Response:
    status = error_status(error)
    headers = {}
    if isinstance(error, OverloadedError):
        headers["retry-after"] = str(error.retry_after_s)
    elif status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        headers["retry-after"] = str(AWAY_RETRY_S)
    # SDKs try again within a second or two, which is too soon for what a person has to mend
    is_passing = isinstance(error, OverloadedError | EngineAwayError)
    if not is_passing and status not in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS):
        headers["x-should-retry"] = "false"
    if status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    body = json.dumps({"error": error_body(error)})
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def add_error_handlers(app: FastAPI) -> None:
    async def on_known(request: Request, error: Exception) -> Response:
        if not isinstance(error, RequestError):
            logger.error("request %s: %s", request.state.request_id, error)
        return error_response(error)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        routes = (r.path.replace(":path}", "}") for r in app.routes if isinstance(r, APIRoute))
        has = ", ".join(dict.fromkeys(routes))
        message = f"{request.method} {request.url.path}: {error.detail}; this server has {has}"
        code = "method_not_allowed" if error.status_code == 405 else "not_found"
        return error_response(RequestError(message, code=code, status=error.status_code))

    async def on_invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        return error_response(RequestError(f"{place}: {first['msg']}", param=place))

    app.add_exception_handler(M1ServeError, on_known)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_invalid)
