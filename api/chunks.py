"""Streamed answers: reply events to server-sent events, in the order of OpenAI's streams. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from m1serve.api.choice import ChoiceStream
from m1serve.api.exchange import Exchange
from m1serve.api.logprobs import logprob_entries
from m1serve.chat.reply import (
    CallArguments,
    CallStarted,
    ContentText,
    ReasoningText,
    ReplyEvent,
)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_LINE_ENDS = {char: f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
"""Of Unicode: some clients read lines by them, which would cut an event in two."""


def sse(value: object) -> bytes:
    return f"data: {_to_json(value)}\n\n".encode()


def _to_json(value: object) -> str:
    text = _encode(value)
    if not text.isascii():
        for char, escape in _LINE_ENDS.items():
            text = text.replace(char, escape)
    return text


class ChunkWriter:
    """One for a response. Tokens without text yet travel with the next chunk of their choice.

    A chunk's fingerprint is the version of the newest token of its choice.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._body = exchange.prepared.body
        self._reasoning_fields = exchange.prepared.defaults.reasoning_fields
        self._has_token_fields = bool(self._body.logprobs or self._body.return_token_ids)
        self._num_sent = [0] * len(exchange.choices)
        self._base: dict[str, object] = {
            "id": f"chatcmpl-{exchange.prepared.generate.id}",
            "object": "chat.completion.chunk",
            "created": int(exchange.prepared.created_at),
            "model": self._body.model,
        }
        self._frames: dict[tuple[int, str], tuple[str, str]] = {}

    def started(self) -> bytes:
        """The first chunk of every choice; the very first tells the prompt's ids, if asked to."""
        role: dict[str, object] = {"role": "assistant", "content": ""}
        chunks = []
        for choice in self._exchange.choices:
            more: dict[str, object] = {}
            if self._body.return_token_ids and choice.index == 0:
                more["prompt_token_ids"] = self._exchange.prepared.generate.prompt_ids
            value = self._choice(choice, role, tokens=0)
            chunks.append(self._chunk([value], self._version(choice), more))
        return b"".join(chunks)

    def step(self, choice: ChoiceStream, events: list[ReplyEvent]) -> bytes:
        frame = self._slow_chunk if self._has_token_fields else self._framed
        chunks = [frame(choice, _delta(event, choice, self._reasoning_fields)) for event in events]
        if choice.stop is not None:
            ending = {"finish_reason": choice.finish_reason, "stop_cause": choice.stop}
            last = self._choice(choice, {}) | ending
            chunks.append(self._chunk([last], self._version(choice), {}))
        return b"".join(chunks)

    def end(self) -> bytes:
        if not self._exchange.prepared.wants_usage_chunk:
            return DONE
        usage: dict[str, object] = {"usage": self._exchange.usage()}
        return self._chunk([], self._exchange.weights_version, usage) + DONE

    def _framed(self, choice: ChoiceStream, delta: dict[str, object]) -> bytes:
        """The chunk that `_slow_chunk` makes; only its delta is written afresh."""
        key = (choice.index, self._version(choice))
        frame = self._frames.get(key)
        if frame is None:
            mark = '"delta":{}'
            whole = self._slow_chunk(choice, {}).decode()
            # the last one: a model's name may say anything
            head, _, tail = whole.rpartition(mark)
            frame = self._frames[key] = (head + mark[:-2], tail)
        return f"{frame[0]}{_to_json(delta)}{frame[1]}".encode()

    def _slow_chunk(self, choice: ChoiceStream, delta: dict[str, object]) -> bytes:
        return self._chunk([self._choice(choice, delta)], self._version(choice), {})

    def _version(self, choice: ChoiceStream) -> str:
        spans = choice.spans
        return spans[-1].weights_version if spans else self._exchange.started_version

    def _choice(
        self, choice: ChoiceStream, delta: dict[str, object], tokens: int | None = None
    ) -> dict[str, object]:
        start = self._num_sent[choice.index]
        end = len(choice.token_ids) if tokens is None else start + tokens
        self._num_sent[choice.index] = end
        value: dict[str, object] = {
            "index": choice.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
        }
        if self._body.logprobs and end > start:
            entries = logprob_entries(self._exchange.serving.tokenizer, choice, start, end)
            value["logprobs"] = {"content": entries, "refusal": None}
        if self._body.return_token_ids:
            value["token_ids"] = choice.token_ids[start:end]
        return value

    def _chunk(
        self, choices: list[dict[str, object]], version: str, more: dict[str, object]
    ) -> bytes:
        value = self._base | {"system_fingerprint": version, "choices": choices}
        if self._exchange.prepared.wants_usage_chunk:
            value["usage"] = None
        return sse(value | more)


def _delta(
    event: ReplyEvent, choice: ChoiceStream, reasoning_fields: Sequence[str]
) -> dict[str, object]:
    match event:
        case ReasoningText(text):
            return dict.fromkeys(reasoning_fields, text)
        case ContentText(text):
            return {"content": text}
        case CallStarted(index, name):
            call: dict[str, object] = {
                "index": index,
                "id": choice.call_ids[index],
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
