"""Wire messages and tools to the values the template knows. Pure."""

from __future__ import annotations

from m1serve.api.schema import ChatRequest, Message, MessageToolCall, Tool
from m1serve.chat.messages import ChatMessage, Role, resolve_tool_names
from m1serve.errors import RequestError
from m1serve.types import ToolCall

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_NO_PARAMETERS: dict[str, object] = {"type": "object", "properties": {}}


def to_messages(request: ChatRequest) -> tuple[ChatMessage, ...]:
    """Null or missing content is empty; malformed arguments of old calls stay as they are."""
    messages: list[ChatMessage] = []
    for place, message in enumerate(request.messages):
        messages += _to_messages(message, f"messages[{place}]")
    return resolve_tool_names(messages)


def to_tools(request: ChatRequest) -> tuple[dict[str, object], ...]:
    """Flat name, description, parameters as M1's guide has them; none when calls are not wanted."""
    if request.tool_choice == "none":
        return ()
    return tuple(_to_tool(tool, f"tools[{n}]") for n, tool in enumerate(request.tools or ()))


def _to_messages(message: Message, where: str) -> list[ChatMessage]:
    role = _ROLES[message.role]
    texts = _texts(message, where)
    if role == "tool" and isinstance(message.content, list) and len(texts) > 1:
        names = [part.name for part in message.content]
        if any(names):
            return [
                ChatMessage(
                    role=role,
                    content=text,
                    tool_call_id=message.tool_call_id,
                    name=name or message.name,
                )
                for text, name in zip(texts, names, strict=True)
            ]
    calls = [*(message.tool_calls or ()), *_legacy_call(message)]
    return [
        ChatMessage(
            role=role,
            # M1's template writes an answer's parts without anything between them
            content=("" if role == "assistant" else "\n").join(texts),
            reasoning=message.reasoning_content or message.reasoning,
            tool_calls=tuple(map(_to_call, calls)),
            tool_call_id=message.tool_call_id,
            name=_tool_name(message) if role == "tool" else None,
        )
    ]


def _texts(message: Message, where: str) -> list[str]:
    if message.content is None or isinstance(message.content, str):
        return [message.content or ""]
    texts: list[str] = []
    for place, part in enumerate(message.content):
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise RequestError(
                f"{where}.content[{place}] has no text (type {part.type[:80]!r}); this model "
                'reads text only: send {"type": "text", "text": ...}',
                param=f"{where}.content[{place}]",
            )
        texts.append(text)
    return texts


def _legacy_call(message: Message) -> list[MessageToolCall]:
    """`function_call`, as clients sent it before there were tools."""
    function = message.function_call
    return [] if function is None else [MessageToolCall(function=function)]


def _tool_name(message: Message) -> str | None:
    parts = message.content if isinstance(message.content, list) else []
    return next((part.name for part in parts if part.name), None) or message.name


def _to_call(call: MessageToolCall) -> ToolCall:
    function = call.function
    return ToolCall(name=function.name, arguments=function.arguments or "{}", id=call.id or "")


def _to_tool(tool: Tool, where: str) -> dict[str, object]:
    spec = tool.function or tool
    if tool.type != "function" or spec.name is None:
        raise RequestError(
            f"{where} is no function with a name (type {tool.type!r}); wanted "
            '{"type": "function", "function": {"name": ..., "parameters": ...}}',
            param=where,
        )
    return {
        "name": spec.name,
        "description": spec.description or "",
        "parameters": spec.parameters if spec.parameters is not None else _NO_PARAMETERS,
    }
