"""One message of a conversation, as the template wants it: plain strings, tool names resolved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from m1serve.types import ToolCall

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    role: Role
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    """Of the tool whose result a tool message carries."""


def resolve_tool_names(messages: Iterable[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Tool messages without a name get that of the newest call with their id."""
    name_of: dict[str, str] = {}
    resolved: list[ChatMessage] = []
    for message in messages:
        for call in message.tool_calls:
            name_of[call.id] = call.name
        if message.role == "tool" and message.name is None:
            name = name_of.get(message.tool_call_id or "", "tool")
            message = replace(message, name=name)
        resolved.append(message)
    return tuple(resolved)
