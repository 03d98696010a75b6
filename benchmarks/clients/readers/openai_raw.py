"""openai-py as most programs use it: chunks put together by index."""

from __future__ import annotations

from typing import Any

from openai import OpenAI
from protocol import base_url, choice, run, usage

client = OpenAI(base_url=base_url(), api_key="x", max_retries=0)


def read(request: dict[str, Any]) -> dict[str, Any]:
    if request.get("stream"):
        return read_stream(request)
    whole = client.chat.completions.create(**request)
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


def read_stream(request: dict[str, Any]) -> dict[str, Any]:
    parts: dict[int, dict[str, Any]] = {}
    counted = None
    for chunk in client.chat.completions.create(**request):
        if chunk.usage:
            counted = usage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
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


run("openai", read)
