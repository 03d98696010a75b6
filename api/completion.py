"""The whole answer as one body: the same events as a stream's, folded. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from m1serve.api.choice import ChoiceStream
from m1serve.api.exchange import Exchange
from m1serve.api.logprobs import logprob_entries

_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def completion_body(exchange: Exchange) -> bytes:
    prepared = exchange.prepared
    value: dict[str, object] = {
        "id": f"chatcmpl-{prepared.generate.id}",
        "object": "chat.completion",
        "created": int(prepared.created_at),
        "model": prepared.body.model,
        "system_fingerprint": exchange.weights_version,
        "choices": [_choice(exchange, choice) for choice in exchange.choices],
        "usage": exchange.usage(),
    }
    if prepared.body.return_token_ids:
        value["prompt_token_ids"] = prepared.generate.prompt_ids
    return _to_json(value).encode()


def _choice(exchange: Exchange, choice: ChoiceStream) -> dict[str, object]:
    body = exchange.prepared.body
    value: dict[str, object] = {
        "index": choice.index,
        "message": _message(choice, exchange.prepared.defaults.reasoning_fields),
        "finish_reason": choice.finish_reason,
        "stop_cause": choice.stop,
        "logprobs": None,
    }
    if body.logprobs:
        tok, end = exchange.serving.tokenizer, len(choice.token_ids)
        value["logprobs"] = {"content": logprob_entries(tok, choice, 0, end), "refusal": None}
    if body.return_token_ids:
        value["token_ids"] = choice.token_ids
    return value


def _message(choice: ChoiceStream, reasoning_fields: Sequence[str]) -> dict[str, object]:
    message = choice.message
    # OpenAI's content is null only beside tool calls
    content = message.content if message.content or not message.tool_calls else None
    value: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    if message.reasoning is not None:
        value |= dict.fromkeys(reasoning_fields, message.reasoning)
    if message.tool_calls:
        value["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return value
