"""The incremental half of reply.py: a state machine over text that arrives in any pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from m1serve.chat.json_scan import JsonScanner, ScanEnd, raw_members
from m1serve.chat.tokenizer import CALLS, CALLS_END, THINK, THINK_END
from m1serve.types import ToolCall

_CALL_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)', re.S
)


@dataclass(frozen=True, slots=True)
class ReasoningText:
    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str


ReplyEvent = ReasoningText | ContentText | CallStarted | CallArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    reasoning: str | None
    """None when there was no think block."""
    content: str
    tool_calls: tuple[ToolCall, ...]
    """Without ids: those are given by whoever delivers the reply."""
    is_well_formed: bool
    """A closed think block or none, then content and at most one closed block of calls, each an
    object of exactly a name and an arguments object; nothing after the calls, no stray tags, and
    something besides reasoning."""


class ReplyParser:
    """Push text as it comes, then `finish` once; each returns the events that became certain."""

    def __init__(self, *, parse_calls: bool = True) -> None:
        self._parse_calls = parse_calls
        self._step: Callable[[], bool] = self._at_start
        self._buffer = ""
        self._skip = ""
        self._events: list[ReplyEvent] = []
        self._scanner = JsonScanner()
        self._scanned = 0
        self._tail = ""
        self._num_blocks = 0
        self._is_well_formed = True
        self._reasoning: list[str] | None = None
        self._content: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []

    def push(self, text: str) -> list[ReplyEvent]:
        self._buffer += text
        while self._step():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[ReplyEvent]:
        """The text is over: what was held back goes where it belongs."""
        rest, self._buffer = self._buffer, ""
        if self._step == self._in_think:
            self._is_well_formed = False
            self._reason(rest)
        elif self._step in (self._at_start, self._in_content):
            self._say(rest)
        else:
            self._is_well_formed = False
            if self._step == self._in_object:
                self._say(rest)
        events, self._events = self._events, []
        return events

    def parsed(self) -> ParsedReply:
        """Of everything so far; final after `finish`."""
        content = "".join(self._content)
        calls = tuple(
            ToolCall(name=name, arguments="".join(pieces)) for name, pieces in self._calls
        )
        has_stray_tag = any(tag in content for tag in (THINK, THINK_END, CALLS, CALLS_END))
        says_something = bool(calls) or bool(content.strip())
        return ParsedReply(
            reasoning=None if self._reasoning is None else "".join(self._reasoning),
            content=content,
            tool_calls=calls,
            is_well_formed=self._is_well_formed and not has_stray_tag and says_something,
        )

    # Each step consumes what it can of the buffer and says whether the next step may go on.

    def _at_start(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(THINK):
            self._buffer, self._skip = text[len(THINK) :], "\n"
            self._reasoning = []
            self._step = self._in_think
            return True
        if THINK.startswith(text):
            return False
        self._step = self._in_content
        return True

    def _in_think(self) -> bool:
        if self._skip:
            if not self._buffer:
                return False
            self._buffer, self._skip = self._buffer.removeprefix(self._skip), ""
        end = self._buffer.find(THINK_END)
        if end >= 0:
            self._reason(self._buffer[:end].removesuffix("\n"))
            self._buffer, self._skip = self._buffer[end + len(THINK_END) :], "\n"
            self._step = self._in_content
            return True
        safe = len(self._buffer) - _partial(self._buffer, THINK_END)
        if self._buffer.endswith("\n", 0, safe):
            safe -= 1
        self._reason(self._buffer[:safe])
        self._buffer = self._buffer[safe:]
        return False

    def _in_content(self) -> bool:
        if self._skip:
            self._buffer = self._buffer.lstrip(self._skip)
            if not self._buffer:
                return False
            self._skip = ""
        start = self._buffer.find(CALLS) if self._parse_calls else -1
        if start >= 0:
            self._say(self._buffer[:start].rstrip())
            self._buffer = self._buffer[start + len(CALLS) :]
            self._num_blocks += 1
            self._is_well_formed &= self._num_blocks == 1
            self._step = self._in_block
            return True
        safe = len(self._buffer)
        if self._parse_calls:
            safe = len(self._buffer[: safe - _partial(self._buffer, CALLS)].rstrip())
        self._say(self._buffer[:safe])
        self._buffer = self._buffer[safe:]
        return False

    def _in_block(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith(CALLS_END):
            self._buffer, self._skip = self._buffer[len(CALLS_END) :], " \t\r\n"
            self._step = self._in_content
            return True
        if CALLS_END.startswith(self._buffer):
            return False
        if self._buffer[0] == "{":
            self._scanner, self._scanned = JsonScanner(), 0
            self._step = self._in_object
        else:
            self._is_well_formed = False
            self._step = self._in_junk
        return True

    def _in_object(self) -> bool:
        """Held back until the name is known, or to its end if members come in another order."""
        head = _CALL_HEAD.match(self._buffer)
        name = _json_string(head[1]) if head else None
        if head and name is not None:
            self._start_call(name)
            self._buffer = self._buffer[head.end() :]
            self._scanner = JsonScanner()
            self._step = self._in_arguments
            return True
        end, why = self._scanner.feed(self._buffer, self._scanned)
        self._scanned = end
        if why is ScanEnd.OPEN:
            return False
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        self._take_object(text)
        self._step = self._in_block if why is ScanEnd.CLOSED else self._at_cut
        return True

    def _in_arguments(self) -> bool:
        end, why = self._scanner.feed(self._buffer)
        self._argue(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if why is ScanEnd.OPEN:
            return False
        if why is ScanEnd.CLOSED:
            self._scanner, self._tail = JsonScanner(depth=1), ""
            self._step = self._after_arguments
        else:
            self._step = self._at_cut
        return True

    def _after_arguments(self) -> bool:
        """The rest of the call's object; members beside name and arguments are ignored."""
        end, why = self._scanner.feed(self._buffer)
        self._tail += self._buffer[:end]
        self._buffer = self._buffer[end:]
        if why is ScanEnd.OPEN:
            return False
        arguments = "".join(self._calls[-1][1])
        self._is_well_formed &= self._tail.strip() == "}" and _is_json_object(arguments)
        self._step = self._in_block if why is ScanEnd.CLOSED else self._at_cut
        return True

    def _at_cut(self) -> bool:
        """At a `<` that ended an unfinished object: the closing tag, or junk."""
        self._is_well_formed = False
        self._step = self._in_block
        return True

    def _in_junk(self) -> bool:
        """A line in the block that is no object is shown as content."""
        ends = [self._buffer.find(mark) for mark in ("\n", CALLS_END)]
        end = min((place for place in ends if place >= 0), default=-1)
        if end >= 0:
            is_line = self._buffer[end] == "\n"
            self._say(self._buffer[: end + is_line])
            self._buffer = self._buffer[end + is_line :]
            self._step = self._in_block
            return True
        safe = len(self._buffer) - _partial(self._buffer, CALLS_END)
        self._say(self._buffer[:safe])
        self._buffer = self._buffer[safe:]
        return False

    def _take_object(self, text: str) -> None:
        members = raw_members(text)
        value_of = dict(members or ())
        name = _json_string(value_of.get("name", ""))
        arguments = value_of.get("arguments", "")
        if members is None or name is None or not arguments.startswith("{"):
            self._is_well_formed = False
            self._say(text)
            return
        self._is_well_formed &= len(members) == 2
        self._start_call(name)
        self._argue(arguments)

    def _start_call(self, name: str) -> None:
        self._events.append(CallStarted(len(self._calls), name))
        self._calls.append((name, []))

    def _argue(self, text: str) -> None:
        if text:
            self._calls[-1][1].append(text)
            self._events.append(CallArguments(len(self._calls) - 1, text))

    def _reason(self, text: str) -> None:
        if text and self._reasoning is not None:
            self._reasoning.append(text)
            self._events.append(ReasoningText(text))

    def _say(self, text: str) -> None:
        if text:
            self._is_well_formed &= self._num_blocks == 0
            self._content.append(text)
            self._events.append(ContentText(text))


def _partial(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(tag[:size])), 0)


def _json_string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
