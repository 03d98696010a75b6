"""Does a checkpoint's own Jinja template say what `chat/template` says? Rendered and compared.

The template comes with the weights, so it runs in Jinja's sandbox; no request ever renders it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.chat.messages import ChatMessage
from m1serve.chat.template import encode_prompt

_TOOLS: list[dict[str, object]] = [
    {"name": "look", "description": "Find é", "parameters": {"type": "object", "properties": {}}}
]
_SHOWN_CHARS = 40
_PROMPT = {"add_generation_prompt": True}
_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
    MemoryError,
)


def template_difference(source: str) -> str | None:
    """None when conversations with systems, tools and tool results come out the same.

    Otherwise where the first one differs, or why the template cannot be rendered.
    """
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    tok = byte_tokenizer()
    try:
        template = environment.from_string(source)
        for messages in _conversations():
            for tools in ([], _TOOLS):
                ours = tok.decode(encode_prompt(tok, messages, tools).ids)
                theirs = _rendered(template, messages, tools, wanted=ours)
                if ours != theirs:
                    return _first_difference(ours, theirs)
    except _FAILURES as error:
        return f"it cannot be rendered ({type(error).__name__}: {error})"
    return None


def _rendered(
    template: Template,
    messages: Sequence[ChatMessage],
    tools: Sequence[dict[str, object]],
    *,
    wanted: str,
) -> str:
    """Contents as parts, as the published template has them; as strings if only these come out."""
    try:
        text = template.render(messages=_as_parts(messages), tools=tools, **_PROMPT)
    except _FAILURES:
        return template.render(messages=_as_strings(messages), tools=tools, **_PROMPT)
    if text == wanted:
        return text
    try:
        strings = template.render(messages=_as_strings(messages), tools=tools, **_PROMPT)
    except _FAILURES:
        return text
    return strings if strings == wanted else text


def _conversations() -> Iterator[list[ChatMessage]]:
    system = ChatMessage(role="system", content="Be brief.")
    user = ChatMessage(role="user", content="Hi é")
    assistant = ChatMessage(role="assistant", content="Hello")
    yield [user]
    yield [system, user, assistant, user]
    yield [system, user, assistant, ChatMessage(role="tool", content="r", name="look")]


def _as_parts(messages: Iterable[ChatMessage]) -> list[dict[str, object]]:
    """As the published template wants it."""
    return [
        {"role": m.role, "content": [{"type": "text", "text": m.content, "name": m.name}]}
        for m in messages
    ]


def _as_strings(messages: Iterable[ChatMessage]) -> list[dict[str, object]]:
    """As OpenAI's clients send it; a tool's result keeps its parts, which name the tool."""
    return [
        dict(part) if m.role == "tool" else {"role": m.role, "content": m.content}
        for m, part in zip(messages, _as_parts(messages), strict=True)
    ]


def _first_difference(ours: str, theirs: str) -> str:
    pairs = zip(ours, theirs, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    start = max(0, at - _SHOWN_CHARS // 2)
    end = start + _SHOWN_CHARS
    return f"it renders {theirs[start:end]!r} where m1serve renders {ours[start:end]!r}"
