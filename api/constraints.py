"""response_format, tool_choice, parallel_tool_calls and strict tools as one grammar, or none. Pure.

A named or required call ends with finish_reason "tool_calls", in streams and bodies alike. Schemas
bind whether or not they say `strict`; `strict` tools bind their arguments, others are bound when a
call is forced and their schema can be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from m1serve.api.schema import ChatRequest, Tool
from m1serve.chat.grammar import (
    MAX_CALLS,
    CallableTool,
    after_tag_grammar,
    calls_grammar,
    json_grammar,
    json_or_calls_grammar,
)
from m1serve.chat.json_schema import check_schema
from m1serve.errors import RequestError
from m1serve.types import Capabilities, Grammar, GrammarStart


def to_grammar(request: ChatRequest, capabilities: Capabilities) -> Grammar | None:
    """Raises RequestError for contradictions, for schemas beyond the limits and when the engine
    cannot constrain; what does not compile is refused by the engine before it begins."""
    grammar = _grammar(request)
    if grammar is not None and not capabilities.has_grammar:
        raise RequestError(
            f"this engine does not constrain its output, which {grammar.param} asks for: leave it "
            "out",
            param=grammar.param,
            code="unsupported",
        )
    return grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offered:
    """A tool of the request."""

    tool: CallableTool
    param: str
    is_strict: bool


def _grammar(request: ChatRequest) -> Grammar | None:
    forced = _forced(request)
    answer = _answer(request)
    offered = [] if request.tool_choice == "none" else _offered(request.tools or ())
    is_single = request.parallel_tool_calls is False
    if forced is not None:
        if answer is not None:
            raise RequestError(
                f"response_format asks for JSON and tool_choice for a call: send one of them (got "
                f"{answer.param} and tool_choice {request.tool_choice!r})",
                param="response_format",
            )
        is_named = isinstance(request.tool_choice, dict)
        return _forced_calls([offered[i] for i in forced], is_single=is_single or is_named)
    if answer is not None:
        return _with_calls(request, answer, offered, is_single=is_single)
    if offered and (is_single or any(tool.is_strict for tool in offered)):
        return Grammar(
            text=after_tag_grammar(_bound(offered), max_calls=_most(is_single=is_single)),
            start=GrammarStart.CALLS,
            param="parallel_tool_calls" if is_single else "tools",
        )
    return None


def _forced(request: ChatRequest) -> list[int] | None:
    """Places of the tools of which one has to be called; None when none has to."""
    choice, tools = request.tool_choice, request.tools or []
    if choice in (None, "auto", "none"):
        return None
    names = [(tool.function or tool).name for tool in tools]
    if choice == "required":
        if not names:
            raise RequestError(
                "tool_choice 'required' has no tools to choose from; send tools",
                param="tool_choice",
            )
        return list(range(len(names)))
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(choice, dict) or choice.get("type") != "function" or name is None:
        raise RequestError(
            f"tool_choice is {str(choice)[:80]!r}; wanted 'auto', 'none', 'required' or "
            '{"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    if name not in names:
        raise RequestError(
            f"tool_choice names {str(name)[:80]!r}, which is not among the tools {names[:20]}",
            param="tool_choice",
        )
    return [names.index(name)]


def _answer(request: ChatRequest) -> Grammar | None:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar(text=json_grammar(None), param="response_format")
    if wanted.type != "json_schema":
        raise RequestError(
            f"response_format {wanted.type[:80]!r} is not known; wanted 'text', 'json_object' or "
            "'json_schema'",
            param="response_format.type",
        )
    where = "response_format.json_schema"
    if wanted.json_schema is None or wanted.json_schema.json_schema is None:
        raise RequestError(
            f'{where} has no schema; wanted {{"name": ..., "schema": {{...}}}}', param=where
        )
    schema = wanted.json_schema.json_schema
    check_schema(schema, f"{where}.schema")
    return Grammar(text=json_grammar(schema), param=f"{where}.schema")


def _with_calls(
    request: ChatRequest, answer: Grammar, offered: Sequence[_Offered], *, is_single: bool
) -> Grammar:
    """JSON as the answer; where there are tools, calls instead of it."""
    if not offered:
        return answer
    wanted = request.response_format
    named = wanted.json_schema if wanted is not None else None
    schema = named.json_schema if named is not None else None
    text = json_or_calls_grammar(schema, _bound(offered), max_calls=_most(is_single=is_single))
    return replace(answer, text=text)


def _forced_calls(offered: Sequence[_Offered], *, is_single: bool) -> Grammar:
    most = _most(is_single=is_single)
    loose = calls_grammar(_bound(offered), max_calls=most)
    tight = calls_grammar([_bound_if_possible(tool) for tool in offered], max_calls=most)
    param = "tools"
    if len(offered) == 1:
        param = offered[0].param if offered[0].is_strict else "tool_choice"
    return Grammar(text=tight, fallback=loose if loose != tight else None, param=param)


def _offered(tools: Sequence[Tool]) -> list[_Offered]:
    offered: list[_Offered] = []
    for place, tool in enumerate(tools):
        spec = tool.function or tool
        param = f"tools[{place}].{'function.' if tool.function else ''}parameters"
        if spec.strict and spec.parameters is not None:
            _require_object(spec.parameters, param)
            check_schema(spec.parameters, param)
        offered.append(
            _Offered(
                tool=CallableTool(name=spec.name or "", schema=spec.parameters),
                param=param,
                is_strict=bool(spec.strict),
            )
        )
    return offered


def _bound(offered: Sequence[_Offered]) -> list[CallableTool]:
    """As promised: the strict ones to their schemas."""
    return [o.tool if o.is_strict else replace(o.tool, schema=None) for o in offered]


def _bound_if_possible(offered: _Offered) -> CallableTool:
    schema = offered.tool.schema
    if not offered.is_strict and schema is not None:
        try:
            _require_object(schema, offered.param)
            check_schema(schema, offered.param)
        except RequestError:
            # nothing was promised, and a forced call of any object is better than none
            return replace(offered.tool, schema=None)
    return offered.tool


def _require_object(schema: object, param: str) -> None:
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise RequestError(
            f'{param} describes no object; wanted {{"type": "object", ...}}', param=param
        )


def _most(*, is_single: bool) -> int:
    return 1 if is_single else MAX_CALLS
