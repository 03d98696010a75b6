"""openai-agents over chat completions: what its model hands to an agent's loop."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import (
    FunctionTool,
    ModelSettings,
    ModelTracing,
    OpenAIChatCompletionsModel,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from protocol import base_url, choice, run, usage

set_tracing_disabled(True)
NOT_FOR_SETTINGS = ("model", "messages", "tools", "stream", "stream_options", "max_tokens")


async def never(*_: object) -> str:
    raise AssertionError("tools are not run here")


def tools_of(request: dict[str, Any]) -> list[FunctionTool]:
    return [
        FunctionTool(
            name=tool["function"]["name"],
            description=tool["function"]["description"],
            params_json_schema=tool["function"]["parameters"],
            on_invoke_tool=never,
        )
        for tool in request.get("tools", [])
    ]


async def ask(request: dict[str, Any]) -> Any:  # noqa: ANN401 - a response of one of two types
    more = {name: value for name, value in request.items() if name not in NOT_FOR_SETTINGS}
    settings = ModelSettings(
        max_tokens=request.get("max_tokens"),
        include_usage="stream_options" in request or None,
        extra_args=more or None,
    )
    options: dict[str, Any] = {
        "system_instructions": None,
        "input": request["messages"][0]["content"],
        "model_settings": settings,
        "tools": tools_of(request),
        "output_schema": None,
        "handoffs": [],
        "tracing": ModelTracing.DISABLED,
        "previous_response_id": None,
        "conversation_id": None,
        "prompt": None,
    }
    async with AsyncOpenAI(base_url=base_url(), api_key="x", max_retries=0) as client:
        model = OpenAIChatCompletionsModel(model=request["model"], openai_client=client)
        if not request.get("stream"):
            return await model.get_response(**options)
        last = None
        async for event in model.stream_response(**options):
            if event.type == "response.completed":
                last = event.response
        assert last is not None, "the stream ended without response.completed"
        return last


def read(request: dict[str, Any]) -> dict[str, Any]:
    response = asyncio.run(ask(request))
    content, reasoning, calls = "", "", []
    for item in response.output:
        if item.type == "message":
            content += "".join(getattr(part, "text", "") for part in item.content)
        elif item.type == "reasoning":
            reasoning += "".join(part.text for part in item.summary)
        elif item.type == "function_call":
            calls.append((item.call_id, item.name, item.arguments))
    counted = response.usage
    return {
        "choices": [choice(content, reasoning=reasoning, calls=calls)],
        "usage": counted and usage(counted.input_tokens, counted.output_tokens),
    }


run("openai-agents", read)
