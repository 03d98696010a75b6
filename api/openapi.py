"""The OpenAPI page: schemas of the bodies that we parse ourselves, OpenAI's errors everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "server_error"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS = {
    "description": "An error in OpenAI's shape",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
_STATUSES = ("400", "401", "403", "404", "500", "503")
_JSON: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
_TEXT: dict[str, Any] = {"schema": {"type": "string"}}
_DEAD = {"description": "Dead: `reason` says why", "content": _JSON}


def openapi_page(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """To be put in the place of `app.openapi`; made once."""
    made = app.openapi
    page: dict[str, Any] = {}

    def make() -> dict[str, Any]:
        if not page:
            page.update(_mended(made()))
        return page

    return make


def _mended(page: dict[str, Any]) -> dict[str, Any]:
    schemas: dict[str, Any] = {"Error": _ERROR}
    for path, operations in page["paths"].items():
        for operation in operations.values():
            operation["responses"] = _responses(path, has_body="requestBody" in operation)
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            schemas |= body.get("schema", {}).pop("$defs", {})
    page["components"] = {"schemas": schemas}
    mended = json.dumps(page).replace('"#/$defs/', '"#/components/schemas/')
    result: dict[str, Any] = json.loads(mended)
    return result


def _responses(path: str, *, has_body: bool) -> dict[str, Any]:
    """By status. Our handlers answer for what FastAPI would have refused with 422."""
    if path == "/metrics":
        return {"200": {"description": "For Prometheus", "content": {"text/plain": _TEXT}}}
    fine: dict[str, Any] = {"description": "Fine", "content": _JSON}
    if path == "/health":
        return {"200": fine, "503": _DEAD}
    if path.endswith("completions"):
        fine = {"description": "The answer", "content": _JSON | {"text/event-stream": _TEXT}}
    refused = (*_STATUSES, "413") if has_body else _STATUSES
    return {"200": fine} | dict.fromkeys(refused, _ERRORS)
