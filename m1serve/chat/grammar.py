"""What a constrained reply may look like, as text in llguidance's dialect of Lark. Pure.

Tool calls are spelled as the model writes them (chat/template.py): one JSON object a line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from m1serve.chat.tokenizer import CALLS, CALLS_END

MAX_CALLS = 32
"""In one reply: a model that repeats itself ends some day."""
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Enough to indent; without a bound a model may write blanks until its tokens are used up."""
_LINE_BREAKS = "line_breaks: LINE_BREAKS?\nLINE_BREAKS: /\\n{1,2}/\n"
_ANY_OBJECT: Mapping[str, object] = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableTool:
    name: str
    schema: Mapping[str, object] | None
    """Of its arguments; None allows any object."""


def json_grammar(schema: Mapping[str, object] | None) -> str:
    """A reply that is one JSON value: of a checked schema, or any object."""
    return f"start: line_breaks body\n{_LINE_BREAKS}body: {_json(schema)}\n"


def calls_grammar(tools: Sequence[CallableTool], *, max_calls: int) -> str:
    """A reply that is one block of 1 to `max_calls` calls of these tools and nothing else."""
    return f"start: line_breaks {_text(CALLS)} calls\n{_LINE_BREAKS}" + _calls(tools, max_calls)


def after_tag_grammar(tools: Sequence[CallableTool], *, max_calls: int) -> str:
    """What may follow a `<tool_calls>` tag that the model wrote by itself."""
    return f"start: calls\n{_LINE_BREAKS}" + _calls(tools, max_calls)


def json_or_calls_grammar(
    schema: Mapping[str, object] | None, tools: Sequence[CallableTool], *, max_calls: int
) -> str:
    """A JSON value, or calls where the model wants to look something up first."""
    head = f"start: line_breaks (body | {_text(CALLS)} calls)\n{_LINE_BREAKS}"
    return f"{head}body: {_json(schema)}\n" + _calls(tools, max_calls)


def _calls(tools: Sequence[CallableTool], max_calls: int) -> str:
    kinds = " | ".join(f"call_{place}" for place in range(len(tools)))
    more = f' ("\\n" call){{0,{max_calls - 1}}}' if max_calls > 1 else ""
    lines = [f'calls: line_breaks call{more} "\\n" {_text(CALLS_END)}', f"call: {kinds}"]
    for place, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
        lines.append(f"call_{place}: {_text(head)} arguments_{place} {_text('}')}")
        lines.append(f"arguments_{place}: {_json(tool.schema)}")
    return "\n".join(lines) + "\n"


def _json(schema: Mapping[str, object] | None) -> str:
    options = {"whitespace_pattern": _WHITESPACE}
    return "%json " + json.dumps({**(schema or _ANY_OBJECT), "x-guidance": options})


def _text(text: str) -> str:
    return json.dumps(text)
