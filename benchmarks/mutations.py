"""Hostile HTTP requests: valid bodies bent at random places, drawn from a seed. Pure."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_TOOL = {
    "type": "function",
    "function": {
        "name": "get_order",
        "description": "An order",
        "parameters": {"type": "object", "properties": {"order_id": {"type": "string"}}},
    },
}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_HISTORY = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "Order 4217?"}]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "{}"},
    {"role": "user", "content": "And now?"},
]
_SMALL = {"model": "nano", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
_SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7}
_PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
_STOPS = {
    "repetition_stop_tokens": 3000,
    "repetition_stop_probability": 0.99,
    "reasoning_budget": 2,
}
_SCHEMA = {"name": "s", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
_PROMPT = {"model": "nano", "prompt": "Once", "max_tokens": 4}
VALID: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", _SMALL),
    ("/v1/chat/completions", _SMALL | {"stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", _SMALL | {"messages": _HISTORY, "tools": [_TOOL], "n": 2}),
    ("/v1/chat/completions", _SMALL | {"tools": [_TOOL], "tool_choice": "auto", "stream": True}),
    ("/v1/chat/completions", _SMALL | {"tools": [_TOOL], "tool_choice": "required"}),
    ("/v1/chat/completions", _SMALL | _SAMPLING | _PENALTIES),
    ("/v1/chat/completions", _SMALL | _STOPS),
    ("/v1/chat/completions", _SMALL | {"logprobs": True, "top_logprobs": 5, "stop": ["a", "b"]}),
    ("/v1/chat/completions", _SMALL | {"logit_bias": {"5": 3.0}, "stop_token_ids": [9]}),
    ("/v1/chat/completions", _SMALL | {"metadata": {"task_id": "t"}, "store": False, "user": "u"}),
    (
        "/v1/chat/completions",
        _SMALL | {"response_format": {"type": "json_schema", "json_schema": _SCHEMA}},
    ),
    ("/v1/completions", _PROMPT | {"echo": True, "logprobs": 2}),
    ("/v1/completions", _PROMPT | {"prompt": [5, 6, 7], "n": 2, "stream": True}),
    ("/v1/completions", _PROMPT | {"prompt": [[5, 6], [7]], "stop": "a"}),
    ("/v1/feedback", {"session_id": "s-1", "value": 1.0, "metric": "reward", "comment": "c"}),
)


class Raw(str):
    """JSON text that `json.dumps` would not write."""

    __slots__ = ()


_INTEGERS = (0, -1, 1, 2, 2**31, 2**63, 2**64, 10**30, -(10**18), 896, 1280, 10**6)
_FLOATS = (0.0, -0.0, 1e308, -1e308, 5e-324, 0.1, 2.0000001, 1e-12)
_TEXTS = (
    "",
    " ",
    "\x00",
    "\ud800",
    "a\udfffb",
    "\ufeff",
    "\u202e",
    "nano",
    "<end_of_sentence>",
    "<think>",
    "<tool_calls>\n{",
    "../../etc/passwd",
    "a" * 5000,
    "😀" * 300,
    "%s%n{}",
)
_RAW = ("NaN", "Infinity", "-Infinity", "1e999", "-0", "01", "tru", "'a'", "9" * 400, "1e-999")
_DEEP = (Raw("[" * 3000 + "]" * 3000), Raw('{"a":' * 2000 + "1" + "}" * 2000), Raw("[" * 5000))
_OTHERS = (None, True, False, [], {}, [[]], [None], {"": None}, {"a": {"b": []}}, [1] * 2000)
_FIELDS = ("n", "stop", "tools", "tool_choice", "response_format", "logit_bias", "messages", "x")
_SCHEMAS = (
    {"$ref": "#"},
    {"type": "nonsense"},
    {"pattern": "(a+)+$", "type": "string"},
    {"enum": []},
    {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
    {"minimum": "x", "type": "integer"},
    {"allOf": [False]},
    {"type": "string", "maxLength": 10**9},
    {"type": "array", "items": {"type": "array", "items": {"$ref": "#"}}, "minItems": 10**6},
)


_HEADERS = (
    *("x-m1-mode", "x-m1-session-id", "x-m1-group-id", "x-m1-task-id", "authorization"),
    *("content-type", "x-stainless-retry-count", "accept-encoding", "cookie", "expect"),
)
_HEADER_VALUES = (
    *(b"", b"\xff\xfe", b"a" * 3000, b"Bearer ", b"Bearer \xe9", b"-1", b"100-continue"),
    *(b"train,off", b"a b", b"text/plain; charset=utf-7", b"' or 1=1 --", b"\t"),
)
_METHODS = (b"GET", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"HEAD", b"BREW")
_TARGETS = (
    *("/v1/models/", "/v1/models/%00", "/v1/models/a/b/c", "/v1/sessions/%ff/end", "/v1"),
    *("//v1//models", "/v1/sessions/../end", "/s/%2e%2e/v1/models", "/metrics?a=%zz", "/v1/m/../"),
    *("/v1/embeddings", "/v1/responses", "/" + "a" * 4000, "/v1/models?x=" + "y" * 2000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """One request, as bytes on a socket."""

    name: str
    head: bytes
    body: bytes
    hangs_up: bool = False
    """Closes instead of reading the answer."""
    pause_at: int | None = None
    """Place in the body after which the rest comes late."""
    is_http: bool = field(default=True)
    """False: the HTTP server itself may refuse it, in words of its own."""


def draw_request(draw: random.Random) -> Hostile:
    path, valid = draw.choice(VALID)
    body = copy.deepcopy(valid)
    make = draw.choices(list(_MAKERS), weights=list(_MAKERS.values()))[0]
    return make(draw, path, body)


def _bent(draw: random.Random, path: str, body: dict[str, Any]) -> Hostile:
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        _bend(draw, body)
    return _request("bent values", path, _dump(body))


def _bend(draw: random.Random, body: dict[str, Any]) -> None:
    """One place somewhere inside: another value, gone, or one more."""
    node: Any = body
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            break
        key = draw.choice(keys)
        is_leaf = not isinstance(node[key], dict | list) or isinstance(node[key], Raw)
        if is_leaf or draw.random() < 0.3:
            break
        node = node[key]
    action = draw.random()
    if action < 0.15 and keys:
        del node[key]
    elif action < 0.3 and isinstance(node, dict):
        node[draw.choice(_FIELDS)] = _value(draw)
    elif keys:
        node[key] = _value(draw)
    else:
        body[draw.choice(_FIELDS)] = _value(draw)


def _value(draw: random.Random) -> Any:  # noqa: ANN401 - anything
    kinds = (_INTEGERS, _FLOATS, _TEXTS, tuple(map(Raw, _RAW)), _OTHERS, _SCHEMAS, _DEEP)
    chosen = draw.choices(kinds, weights=(4, 3, 4, 3, 4, 1, 1))[0]
    return copy.deepcopy(draw.choice(chosen))


def _dump(value: Any) -> bytes:  # noqa: ANN401 - anything
    """JSON, with what is Raw as it is; lone surrogates are escapes, or bytes that no UTF-8 has."""
    return _text(value).encode("utf-8", "surrogatepass")


def _text(value: Any) -> str:  # noqa: ANN401 - anything
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    return json.dumps(value, ensure_ascii=len(str(value)) % 2 == 0)


def _schema(draw: random.Random, path: str, body: dict[str, Any]) -> Hostile:
    """As a response format, or as the parameters of a tool that must be called."""
    schema = draw.choice((*_SCHEMAS, *_OTHERS, *_DEEP))
    body = dict(_SMALL)
    if draw.random() < 0.5:
        named = {"name": "s", "schema": schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    else:
        function = {"name": "f", "parameters": schema, "strict": True}
        body |= {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    return _request("bad schemas", "/v1/chat/completions", _dump(body))


def _twice(draw: random.Random, path: str, body: dict[str, Any]) -> Hostile:
    key = draw.choice(list(body))
    again = f"{json.dumps(key)}:{_text(_value(draw))}".encode("utf-8", "surrogatepass")
    return _request("duplicate keys", path, b"{" + again + b"," + _dump(body)[1:])


def _broken_bytes(draw: random.Random, path: str, body: dict[str, Any]) -> Hostile:
    data = bytearray(_dump(body))
    way = draw.randrange(6)
    if way == 0:
        del data[draw.randrange(len(data)) :]
    elif way == 1:
        data[draw.randrange(len(data))] = draw.randrange(256)
    elif way == 2:
        data = bytearray(data.decode().encode(draw.choice(("utf-16", "utf-32", "utf-8-sig"))))
    elif way == 3:
        data = bytearray(draw.randbytes(draw.randrange(300)))
    elif way == 4:
        place = draw.randrange(len(data))
        data[place:place] = draw.choice((b"\xff\xfe", b"\xc0\xaf", b"\xed\xa0\x80", b"\x00" * 40))
    else:
        data += draw.choice((b"{}", b",", b"\x00", b"null", b"]" * 100))
    return _request("broken bytes", path, bytes(data))


def _giant(draw: random.Random, path: str, body: dict[str, Any]) -> Hostile:
    size = draw.choice((10**5, 10**6, 3 * 10**6))
    text = draw.choice(("a", "word ", "é", "\u2028", "<", "9")) * size
    body = dict(_SMALL)
    place = draw.randrange(4)
    if place == 0:
        body["messages"] = [{"role": "user", "content": text[:size]}]
    elif place == 1:
        body["messages"] = [{"role": "user", "content": "x"}] * (size // 50)
    elif place == 2:
        body["stop"] = text[:size]
    else:
        body[text[:size]] = 1
    return _request("giant values", "/v1/chat/completions", _dump(body))


def _odd_headers(draw: random.Random, path: str, body: dict[str, Any]) -> Hostile:
    header = draw.choice(_HEADERS).encode() + b": " + draw.choice(_HEADER_VALUES) + b"\r\n"
    return _request("odd headers", path, _dump(body), more=header)


def _odd_target(draw: random.Random, path: str, body: dict[str, Any]) -> Hostile:
    method = b"POST" if draw.random() < 0.5 else draw.choice(_METHODS)
    target = draw.choice((*_TARGETS, path))
    return _request("odd targets", target, _dump(body), method=method, is_http=False)


def _wrong_length(draw: random.Random, path: str, body: dict[str, Any]) -> Hostile:
    data = _dump(body)
    length = draw.choice(
        (b"0", b"1", b"%d" % (len(data) * 2), b"-5", b"1e3", b"9" * 30, b"", b"+4")
    )
    return _request("wrong lengths", path, data, length=length, is_http=False)


def _slow(draw: random.Random, path: str, body: dict[str, Any]) -> Hostile:
    data = _dump(body)
    whole = _request("slow bodies", path, data)
    return Hostile(
        name=whole.name,
        head=whole.head,
        body=data if draw.random() < 0.5 else data[: len(data) // 2],
        hangs_up=draw.random() < 0.5,
        pause_at=draw.randrange(len(data)),
        is_http=False,
    )


def _request(
    name: str,
    path: str,
    body: bytes,
    *,
    more: bytes = b"",
    method: bytes = b"POST",
    length: bytes | None = None,
    is_http: bool = True,
) -> Hostile:
    head = method + b" " + path.encode() + b" HTTP/1.1\r\nhost: h\r\nconnection: close\r\n"
    if not more.startswith(b"content-type"):
        head += b"content-type: application/json\r\n"
    counted = b"%d" % len(body) if length is None else length
    head += more + b"content-length: " + counted + b"\r\n\r\n"
    return Hostile(name=name, head=head, body=body, is_http=is_http and not more)


_Maker = Callable[[random.Random, str, dict[str, Any]], Hostile]
_MAKERS: dict[_Maker, int] = {
    _bent: 60,
    _schema: 6,
    _twice: 6,
    _broken_bytes: 10,
    _giant: 1,
    _odd_headers: 6,
    _odd_target: 5,
    _wrong_length: 4,
    _slow: 4,
}
