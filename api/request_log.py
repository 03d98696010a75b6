"""ASGI middleware: gives each request its id, counts its response, answers for what broke.

Streams pass untouched.
"""

from __future__ import annotations

import logging
import re
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from m1serve.api.errors import error_response
from m1serve.metrics import Metrics

logger = logging.getLogger(__name__)

_PROXY_ID = re.compile(r"[0-9A-Za-z-]{8,64}")


class RequestLog:
    def __init__(self, app: ASGIApp, *, metrics: Metrics, is_behind_proxy: bool = False) -> None:
        self._app = app
        self._metrics = metrics
        self._is_behind_proxy = is_behind_proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = self._request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id

        is_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_begun
            if message["type"] == "http.response.start":
                is_begun = True
                if not self._is_behind_proxy:
                    named = (b"x-request-id", request_id.encode())
                    message["headers"] = [*message["headers"], named]
                route = getattr(scope.get("route"), "path", "other")
                self._metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            # the last edge before the server: nothing of ours is meant to come this far
            if is_begun:
                raise
            logger.error("request %s failed", request_id, exc_info=error)
            await error_response(error)(scope, receive, send_with_id)

    def _request_id(self, scope: Scope) -> str:
        if self._is_behind_proxy:
            given = Headers(scope=scope).get("x-request-id", "")
            if _PROXY_ID.fullmatch(given):
                return given
        return uuid.uuid4().hex
