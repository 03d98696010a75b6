"""What a parsed reply consists of, and the draft that collects it while text still arrives."""

from __future__ import annotations

from dataclasses import dataclass, field

from m1serve.chat.json_scan import is_json_object
from m1serve.chat.tokenizer import TAGS
from m1serve.types import ToolCall


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
    has_broken_call: bool
    """A call was cut short, or its arguments are no JSON object: it must not be carried out."""
    is_well_formed: bool
    """A closed think block or none, then content and at most one closed block of calls, each an
    object of exactly a name and an arguments object; nothing after the calls, no stray tags, and
    something besides reasoning."""


@dataclass(slots=True)
class _Call:
    name: str
    pieces: list[str] = field(default_factory=list)
    is_whole: bool = False


class ReplyDraft:
    """Adds each piece to the events and to the whole. Empty pieces are no events."""

    def __init__(self) -> None:
        self.is_well_formed = True
        self.has_cut_call = False
        """An object in a block of calls ended before its name was known; it is in the content."""
        self._events: list[ReplyEvent] = []
        self._reasoning: list[str] | None = None
        self._content: list[str] = []
        self._calls: list[_Call] = []

    def begin_reasoning(self) -> None:
        self._reasoning = []

    def reason(self, text: str) -> None:
        if text and self._reasoning is not None:
            self._reasoning.append(text)
            self._events.append(ReasoningText(text))

    def say(self, text: str) -> None:
        if text:
            self._content.append(text)
            self._events.append(ContentText(text))

    def start_call(self, name: str) -> None:
        self._events.append(CallStarted(len(self._calls), name))
        self._calls.append(_Call(name))

    def argue(self, text: str) -> None:
        """More of the newest call's arguments."""
        if text:
            self._calls[-1].pieces.append(text)
            self._events.append(CallArguments(len(self._calls) - 1, text))

    def end_call(self) -> None:
        """The newest call's object was written to its end."""
        call = self._calls[-1]
        call.is_whole = is_json_object("".join(call.pieces))
        self.is_well_formed &= call.is_whole

    def take_events(self) -> list[ReplyEvent]:
        """Those since the last time."""
        events, self._events = self._events, []
        return events

    @property
    def has_broken_call(self) -> bool:
        return self.has_cut_call or not all(call.is_whole for call in self._calls)

    def parsed(self) -> ParsedReply:
        content = "".join(self._content)
        calls = tuple(
            ToolCall(name=call.name, arguments="".join(call.pieces)) for call in self._calls
        )
        has_stray_tag = any(tag in content for tag in TAGS)
        says_something = bool(calls) or bool(content.strip())
        return ParsedReply(
            reasoning=None if self._reasoning is None else "".join(self._reasoning),
            content=content,
            tool_calls=calls,
            has_broken_call=self.has_broken_call,
            is_well_formed=(
                self.is_well_formed
                and not self.has_broken_call
                and not has_stray_tag
                and says_something
            ),
        )
