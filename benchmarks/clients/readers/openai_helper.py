"""openai-py's `.stream()` and `.parse()`, which keep their own idea of a message."""

from __future__ import annotations

from typing import Any

from openai import LengthFinishReasonError, OpenAI
from protocol import base_url, choice, run, usage

client = OpenAI(base_url=base_url(), api_key="x", max_retries=0)


def complete(request: dict[str, Any]) -> Any:  # noqa: ANN401 - a ParsedChatCompletion
    if not request.get("stream"):
        return client.chat.completions.parse(**request)
    options = {name: value for name, value in request.items() if name != "stream"}
    with client.chat.completions.stream(**options) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion()


def read(request: dict[str, Any]) -> dict[str, Any]:
    try:
        whole = complete(request)
    except LengthFinishReasonError as error:
        # the helper's way to hand over what was cut
        whole = error.completion
    return {
        "choices": [
            choice(
                c.message.content,
                reasoning=getattr(c.message, "reasoning_content", None),
                calls=[
                    (call.id, call.function.name, call.function.parsed_arguments)
                    for call in c.message.tool_calls or []
                ],
                finish_reason=c.finish_reason,
            )
            for c in whole.choices
        ],
        "usage": whole.usage and usage(whole.usage.prompt_tokens, whole.usage.completion_tokens),
    }


run("openai", read)
