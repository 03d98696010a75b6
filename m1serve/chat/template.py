"""MiniMax-M1's chat template over token ids: control tokens are placed, everything else is text.

Additions to the published template: string contents, several tool messages in a row form one tool
turn, an assistant's tool calls are rendered as the model writes them. `tojson` is transformers'.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from m1serve.chat.messages import ChatMessage
from m1serve.chat.tokenizer import BOD, BOS, CALLS, CALLS_END, EOS, ChatTokenizer
from m1serve.types import ToolCall

_TOOLS_HEAD = "system tool_setting=tools\nYou are provided with these tools:\n<tools>\n"
_TOOLS_BEFORE_TAGS = "</tools>\n\nIf you need to call tools, please respond with "
_TOOLS_AFTER_TAGS = (
    " XML tags, and provide tool-name and json-object of arguments, following the format below:\n"
)
# the published template's doubled quotes concatenate to nothing: the example is unquoted
_TOOLS_EXAMPLE = "\n{name: <tool-name-1>, arguments: <args-json-object-1>}\n...\n"
_SYSTEM_HEAD = "system ai_setting=assistant\n"
_USER_HEAD = "user name=user\n"
_ASSISTANT_HEAD = "ai name=assistant\n"
_TOOL_HEAD = "tool name=tools\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    ids: tuple[int, ...]
    system_end: int
    """Tokens of the system and tool prefix, which other conversations are likely to share."""


@dataclass(frozen=True, slots=True)
class _Control:
    """A control token or tag that the template itself places."""

    token: str


_Part = str | _Control


def encode_prompt(
    tok: ChatTokenizer, messages: Sequence[ChatMessage], tools: Sequence[dict[str, object]]
) -> RenderedPrompt:
    """Everything from the start with the generation prompt; past thinking is dropped."""
    prefix = _encode(tok, [*_system_parts(messages), *_tool_list_parts(tools)])
    # the line break after the prefix's last sentence is its own piece, so the cut changes no token
    rest = _encode(tok, [*_turn_parts(messages), *_generation_parts()])
    return RenderedPrompt(ids=(*prefix, *rest), system_end=len(prefix))


def encode_extension(
    tok: ChatTokenizer, last_sampled_is_eos: bool, new_messages: Sequence[ChatMessage]
) -> tuple[int, ...]:
    """What follows a sampled turn whose ids are kept; closes its sentence if need be."""
    close: list[_Part] = ["\n"] if last_sampled_is_eos else [_Control(EOS), "\n"]
    return tuple(_encode(tok, [*close, *_turn_parts(new_messages), *_generation_parts()]))


def template_digest() -> str:
    """Changes whenever the same conversation would be rendered differently."""
    calls = (ToolCall(name="t", arguments='{"x": 1}'), ToolCall(name="é", arguments=""))
    parts: list[_Part] = [
        *_system_parts([ChatMessage(role="system", content="s")]),
        *_tool_list_parts([{"name": "t", "description": "é", "parameters": {}}]),
        *_turn_parts(
            [
                ChatMessage(role="user", content="u"),
                ChatMessage(role="assistant", content="a", reasoning="r", tool_calls=calls),
                ChatMessage(role="tool", content="r", name="t"),
                ChatMessage(role="tool", content="r", name="é"),
                ChatMessage(role="assistant", content="", tool_calls=calls),
            ]
        ),
        *_generation_parts(),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _system_parts(messages: Iterable[ChatMessage]) -> list[_Part]:
    system = "".join(message.content for message in messages if message.role == "system")
    sentence = _sentence(_SYSTEM_HEAD, system) if system else []
    return [_Control(BOD), *sentence]


def _tool_list_parts(tools: Sequence[dict[str, object]]) -> list[_Part]:
    if not tools:
        return []
    lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
    return [
        *(_Control(BOS), _TOOLS_HEAD, lines, _TOOLS_BEFORE_TAGS),
        *(_Control(CALLS), _Control(CALLS_END), _TOOLS_AFTER_TAGS),
        *(_Control(CALLS), _TOOLS_EXAMPLE, _Control(CALLS_END)),
        *(_Control(EOS), "\n"),
    ]


def _turn_parts(messages: Iterable[ChatMessage]) -> list[_Part]:
    parts: list[_Part] = []
    for role, run in groupby(messages, key=lambda message: message.role):
        if role == "tool":
            body = "".join(f"tool name: {m.name}\ntool result: {m.content}\n\n" for m in run)
            parts += _sentence(_TOOL_HEAD, body)
        elif role == "user":
            for message in run:
                parts += _sentence(_USER_HEAD, message.content)
        elif role == "assistant":
            for message in run:
                parts += _assistant_parts(message)
    return parts


def _assistant_parts(message: ChatMessage) -> list[_Part]:
    parts: list[_Part] = [_Control(BOS), _ASSISTANT_HEAD, message.content]
    if message.tool_calls:
        if message.content and not message.content.endswith("\n"):
            parts.append("\n")
        lines = "".join(
            f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, '
            f'"arguments": {call.arguments or "{}"}}}\n'
            for call in message.tool_calls
        )
        parts += [_Control(CALLS), "\n" + lines, _Control(CALLS_END)]
    return [*parts, _Control(EOS), "\n"]


def _generation_parts() -> list[_Part]:
    return [_Control(BOS), _ASSISTANT_HEAD]


def _sentence(head: str, text: str) -> list[_Part]:
    return [_Control(BOS), head, text, _Control(EOS), "\n"]


def _encode(tok: ChatTokenizer, parts: Iterable[_Part]) -> list[int]:
    """Text between two control tokens is tokenised as one piece, as in the whole string."""
    ids: list[int] = []
    pending = ""
    for part in parts:
        if isinstance(part, str):
            pending += part
            continue
        token_id = tok.control_ids.get(part.token)
        if token_id is None:
            # a tokenizer whose tags are several tokens spells them like any text
            pending += part.token
            continue
        if pending:
            ids += tok.encode_text(pending)
            pending = ""
        ids.append(token_id)
    return ids + tok.encode_text(pending) if pending else ids
