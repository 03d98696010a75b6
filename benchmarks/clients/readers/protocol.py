"""What the Python readers have in common: requests in, one JSON object of what was got out."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def choice(
    content: str | None = "",
    *,
    reasoning: str | None = "",
    calls: list[tuple[str | None, str, Any]] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    """`calls`: id, name, and arguments as JSON text or parsed."""
    return {
        "content": content or "",
        "reasoning": reasoning or "",
        "calls": [[name, _parsed(arguments)] for _, name, arguments in calls or []],
        "call_ids": [call_id for call_id, _, _ in calls or []],
        "finish_reason": finish_reason,
    }


def _parsed(arguments: Any) -> Any:  # noqa: ANN401 - whatever a client makes of it
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def usage(prompt: int | None, completion: int | None) -> dict[str, Any] | None:
    return None if prompt is None else {"prompt_tokens": prompt, "completion_tokens": completion}


def run(package: str, read: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """`read` takes a request and gives {"choices": [...], "usage": ...}, or raises."""
    results = {}
    for kind in json.loads(Path(sys.argv[2]).read_text()):
        try:
            results[kind["name"]] = read(kind["request"])
        except Exception as error:  # noqa: BLE001 - whatever a client raises is its result
            results[kind["name"]] = {"error": f"{type(error).__name__}: {error}"[:300]}
    print(json.dumps({"version": importlib.metadata.version(package), "results": results}))


def base_url() -> str:
    return sys.argv[1]
