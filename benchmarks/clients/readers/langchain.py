"""langchain-openai's ChatOpenAI. It drops reasoning, and its streams know one choice only."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI
from protocol import base_url, choice, run, usage


def read(request: dict[str, Any]) -> dict[str, Any]:
    options = {k: v for k, v in request.items() if k not in ("messages", "stream")}
    with_usage = "stream_options" in options
    options.pop("stream_options", None)
    tools = options.pop("tools", None)
    model = ChatOpenAI(
        base_url=base_url(), api_key="x", max_retries=0, stream_usage=with_usage, **options
    )
    bound = {"tools": tools} if tools else {}
    messages = [HumanMessage(request["messages"][0]["content"])]
    if request.get("stream"):
        chunks = iter(model.stream(messages, **bound))
        total = next(chunks)
        for chunk in chunks:
            total += chunk
        return answer([(total, total.response_metadata)])
    generations = model.generate([messages], **bound).generations[0]
    return answer([(g.message, g.message.response_metadata) for g in generations])


def answer(messages: list[tuple[AIMessage, dict[str, Any]]]) -> dict[str, Any]:
    counted = messages[0][0].usage_metadata
    return {
        "choices": [
            choice(
                message.content,
                calls=[(call["id"], call["name"], call["args"]) for call in message.tool_calls],
                finish_reason=facts.get("finish_reason"),
            )
            for message, facts in messages
        ],
        "usage": counted and usage(counted["input_tokens"], counted["output_tokens"]),
    }


run("langchain-openai", read)
