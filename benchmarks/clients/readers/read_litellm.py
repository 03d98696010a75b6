"""litellm.completion: chunks put together by index, whole answers as they are."""

from __future__ import annotations

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from protocol import base_url, choice, run, usage


def run_provider(provider: str) -> None:
    def read(request: dict[str, Any]) -> dict[str, Any]:
        answer = litellm.completion(
            **request | {"model": f"{provider}/{request['model']}"},
            api_base=base_url(),
            api_key="x",
            num_retries=0,
            max_retries=0,
        )
        return read_stream(answer) if request.get("stream") else read_whole(answer)

    run("litellm", read)


def read_whole(whole: Any) -> dict[str, Any]:  # noqa: ANN401 - litellm's own type
    return {
        "choices": [
            choice(
                c.message.content,
                reasoning=getattr(c.message, "reasoning_content", None),
                calls=[
                    (call.id, call.function.name, call.function.arguments)
                    for call in c.message.tool_calls or []
                ],
                finish_reason=c.finish_reason,
            )
            for c in whole.choices
        ],
        "usage": usage(whole.usage.prompt_tokens, whole.usage.completion_tokens),
    }


def read_stream(stream: Any) -> dict[str, Any]:  # noqa: ANN401 - litellm's own type
    parts: dict[int, dict[str, Any]] = {}
    counted = None
    for chunk in stream:
        given = getattr(chunk, "usage", None)
        if given:
            counted = usage(given.prompt_tokens, given.completion_tokens)
        for c in chunk.choices:
            part = parts.setdefault(c.index, {"content": "", "reasoning": "", "calls": {}})
            part["content"] += c.delta.content or ""
            part["reasoning"] += getattr(c.delta, "reasoning_content", None) or ""
            for call in c.delta.tool_calls or []:
                made = part["calls"].setdefault(call.index, [None, "", ""])
                made[0] = call.id or made[0]
                made[1] += call.function.name or ""
                made[2] += call.function.arguments or ""
            part["finish"] = c.finish_reason or part.get("finish")
    return {
        "choices": [
            choice(
                part["content"],
                reasoning=part["reasoning"],
                calls=list(part["calls"].values()),
                finish_reason=part["finish"],
            )
            for _, part in sorted(parts.items())
        ],
        "usage": counted,
    }
