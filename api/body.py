"""Reads a request body, up to a limit."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from m1serve.errors import RequestError

MAX_BODY_BYTES = 64 * 2**20
"""Prompts of a million tokens are 4 to 8 MiB."""


async def read_body(request: Request) -> bytes:
    pieces: list[bytes] = []
    size = 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > MAX_BODY_BYTES:
                raise RequestError(
                    f"the body has more than {MAX_BODY_BYTES} bytes; send less",
                    code="body_too_large",
                    status=413,
                )
            pieces.append(piece)
    except ClientDisconnect:
        raise RequestError("the connection ended inside the body") from None
    return b"".join(pieces)
