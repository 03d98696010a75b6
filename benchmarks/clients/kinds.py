"""Every kind of answer our server gives: what the scripted engine writes, and what a client is to
make of it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

KEEP_ALIVE_S = 0.2
"""Of the server in this experiment."""

TEXT = "The order was sent on Monday."
THOUGHT = "The user asks for an order.\nI look it up."
MULTI_BYTE = "Grüße, 你好, שלום, e\u0301, 👩‍👩‍👧‍👦🏳️‍🌈, \U0001f9ea\u200d\u2695"
LINE_ENDS = "a\u2028b\u2029c\x85d\r\ne\rf\x0bg\x0ch\x1ci\n\n: j\n\ndata: [DONE]\n\nk"
"""Some readers of server-sent events take more for the end of a line than the standard does."""
LONG = "".join(f'{n}: "quoted" \\ back, tab\t, Käse, 猫\n' for n in range(70))
"""As one argument about 2 KB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Name and arguments."""
    finish_reason: str = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    name: str
    reply: dict[str, Any]
    """A line of the scripted engine, less its `when`."""
    choices: tuple[Choice, ...] = ()
    """What the client is to have; none when it is to have an error."""
    body: dict[str, Any] = field(default_factory=dict)
    """Of the request, beyond model and messages."""

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def has_usage(self) -> bool:
        """Whether the answer carries it."""
        return not self.is_stream or "stream_options" in self.body

    @property
    def request(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"[{self.name}]"}]
        return {"model": "nano", "messages": messages, **self.body}

    @property
    def script_line(self) -> str:
        return json.dumps({"when": f"[{self.name}]", **self.reply})


def tool(name: str, *arguments: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {argument: {"type": "string"} for argument in arguments},
        "required": list(arguments),
        "additionalProperties": False,
    }
    function = {"name": name, "description": name, "parameters": schema, "strict": True}
    return {"type": "function", "function": function}


TOOLS = [tool("get_order", "order_id"), tool("note", "text"), tool("ping")]
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def written(choice: Choice) -> str:
    """As the model writes it."""
    thought = f"<think>\n{choice.reasoning}\n</think>\n" if choice.reasoning else ""
    lines = (json.dumps({"name": n, "arguments": a}, ensure_ascii=False) for n, a in choice.calls)
    calls = "\n<tool_calls>\n" + "\n".join(lines) + "\n</tool_calls>" if choice.calls else ""
    return thought + choice.content + calls


def both(name: str, *choices: Choice, step_s: float = 0.0, **body: Any) -> list[Kind]:  # noqa: ANN401
    """As a stream with its usage, and in one body."""
    if any(choice.calls for choice in choices):
        body["tools"] = TOOLS
    if len(choices) > 1:
        body["n"] = len(choices)
    texts = [written(choice) for choice in choices]
    reply = {"text": texts[0], "more_texts": texts[1:], "step_s": step_s}
    return [
        Kind(name=f"{name}, streamed", reply=reply, choices=choices, body=body | WITH_USAGE),
        Kind(name=f"{name}, whole", reply=reply, choices=choices, body=body),
    ]


def _messages() -> list[Kind]:
    return [
        *both("content", Choice(content=TEXT)),
        *both("reasoning", Choice(content=TEXT, reasoning=THOUGHT)),
        *both("multi-byte", Choice(content=MULTI_BYTE, reasoning=MULTI_BYTE), step_s=0.021),
        *both("line ends", Choice(content=LINE_ENDS)),
        *both(
            "three choices",
            *(Choice(content=f"{TEXT} {n}", reasoning=THOUGHT) for n in range(3)),
            step_s=0.005,
        ),
        Kind(
            name="usage off",
            reply={"text": TEXT},
            choices=(Choice(content=TEXT),),
            body={"stream": True},
        ),
    ]


def _calls() -> list[Kind]:
    order = ("get_order", {"order_id": "4217"})
    parallel = (order, ("get_order", {"order_id": "7728"}), ("note", {"text": "zwölf 🧪"}))

    def calls(*made: tuple[str, dict[str, Any]], reasoning: str = "") -> Choice:
        return Choice(calls=made, reasoning=reasoning, finish_reason="tool_calls")

    beside_text = Choice(content="I look it up.", calls=(order,), finish_reason="tool_calls")
    return [
        *both("one call", calls(order), step_s=0.021),
        *both("a call after a thought", calls(order, reasoning=THOUGHT)),
        *both("a call beside content", beside_text),
        *both("a call without arguments", calls(("ping", {}))),
        *both("parallel calls", calls(*parallel), step_s=0.021),
        *both("long arguments", calls(("note", {"text": LONG})), step_s=0.001),
    ]


def _ends() -> list[Kind]:
    cut = Choice(content="01234", finish_reason="length")
    thinking = Choice(reasoning="0123", finish_reason="length")
    stopped = Choice(content="one two ")
    kinds = []
    for mode, body in (("streamed", WITH_USAGE), ("whole", {})):
        kinds += [
            Kind(
                name=f"stop string, {mode}",
                reply={"text": "one two STOP three", "step_s": 0.021},
                choices=(stopped,),
                body={"stop": ["STOP"]} | body,
            ),
            # every digit is a token of its own
            Kind(
                name=f"length, {mode}",
                reply={"text": "0123456789"},
                choices=(cut,),
                body={"max_tokens": 5} | body,
            ),
            Kind(
                name=f"length in the thought, {mode}",
                reply={"text": "<think>\n0123456789\n</think>\nFive."},
                choices=(thinking,),
                body={"max_tokens": 6} | body,
            ),
        ]
    return kinds


def _waits_and_errors() -> list[Kind]:
    slow = {"text": TEXT, "delay_s": KEEP_ALIVE_S * 4, "step_s": KEEP_ALIVE_S / 8}
    late_failure = slow | {"fails_after": 4}
    answer = (Choice(content=TEXT),)
    return [
        Kind(name="keep-alives, streamed", reply=slow, choices=answer, body=WITH_USAGE),
        Kind(name="keep-alives, whole", reply=slow, choices=answer),
        Kind(name="error in the stream", reply=late_failure, body=WITH_USAGE),
        Kind(name="error after keep-alives, whole", reply=late_failure),
        Kind(name="refused, streamed", reply={"text": TEXT}, body={"n": 10_000} | WITH_USAGE),
        Kind(name="refused, whole", reply={"text": TEXT}, body={"n": 10_000}),
    ]


def all_kinds() -> list[Kind]:
    return [*_messages(), *_calls(), *_ends(), *_waits_and_errors()]


def script() -> str:
    """For a scripted engine."""
    other = json.dumps({"text": "no kind of ours"})
    return "\n".join([*(kind.script_line for kind in all_kinds()), other]) + "\n"


def requests_file() -> str:
    """What readers read: they do not see what is expected of them."""
    return json.dumps([{"name": kind.name, "request": kind.request} for kind in all_kinds()])


def expected(kind: Kind) -> list[dict[str, Any]]:
    """As readers report it."""
    return [
        asdict(choice) | {"calls": [[name, arguments] for name, arguments in choice.calls]}
        for choice in kind.choices
    ]
