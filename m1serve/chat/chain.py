"""A conversation as a chain of hashes: each prefix of its messages has a name, whoever sends it.

What clients change without meaning to (spaces in arguments, call ids, reasoning) is not part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from m1serve.chat.messages import ChatMessage
from m1serve.types import ToolCall


@dataclass(frozen=True, slots=True)
class Chain:
    keys: tuple[bytes, ...]
    """keys[i] names messages[: i + 1]."""
    _last: hashlib.blake2b = field(repr=False, compare=False)

    def with_answer(self, answer: ChatMessage) -> bytes:
        """The name of the whole conversation and one more message."""
        state = self._last.copy()
        state.update(_words(answer))
        return state.digest()


def chain_of(
    tenant: str,
    alias: str,
    messages: Sequence[ChatMessage],
    tools: Sequence[dict[str, object]],
) -> Chain:
    """One pass over the text; a tenant's names are nobody else's."""
    state = hashlib.blake2b(_canonical([tenant, alias, list(tools)]), digest_size=16)
    keys = []
    for message in messages:
        state.update(_words(message))
        keys.append(state.digest())
    return Chain(tuple(keys), state)


def canonical_call(call: ToolCall) -> bytes:
    """Equal for calls that say the same, however their arguments are spaced."""
    return _canonical([call.name, _arguments(call.arguments)])


def _words(message: ChatMessage) -> bytes:
    calls = [[call.name, _arguments(call.arguments)] for call in message.tool_calls]
    name = message.name if message.role == "tool" else None
    return _canonical([message.role, message.content, calls, name])


def _arguments(text: str) -> object:
    """Clients parse and dump arguments again, so they are compared as JSON."""
    try:
        return [json.loads(text or "{}")]
    except (ValueError, RecursionError):
        return text


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
