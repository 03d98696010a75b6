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
    for operations in page["paths"].values():
        for operation in operations.values():
            # our handlers answer for what FastAPI would have refused
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = _ERRORS
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            schemas |= body.get("schema", {}).pop("$defs", {})
    page["components"] = {"schemas": schemas}
    mended = json.dumps(page).replace('"#/$defs/', '"#/components/schemas/')
    result: dict[str, Any] = json.loads(mended)
    return result
