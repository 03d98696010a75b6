"""ASGI middleware: /s/{session}/v1/... is /v1/... in that session, for clients that take a base URL
and nothing else.
"""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

SESSION_HEADER = b"x-m1-session-id"
_PATH = re.compile(r"/s/(.+?)(/v1(?:/.*)?)", re.DOTALL)


class SessionPath:
    """A session that the header names wins over the path's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _take_session(scope)
        await self._app(scope, receive, send)


def _take_session(scope: Scope) -> None:
    """In place, so that those further out see the route that was found."""
    found = _PATH.fullmatch(scope["path"])
    if found is None:
        return
    session_id, path = found.groups()
    scope["path"], scope["raw_path"] = path, path.encode()
    if all(name.lower() != SESSION_HEADER for name, _ in scope["headers"]):
        # what is no label becomes none either way, and is refused where every label is
        value = session_id.encode("ascii", "backslashreplace")
        scope["headers"] = [*scope["headers"], (SESSION_HEADER, value)]
