"""The incremental half of reply.py: a state machine over text that arrives in any pieces."""

from __future__ import annotations

import re
from collections.abc import Callable

from m1serve.chat.call_block import CallBlock, partial_tag
from m1serve.chat.reply_draft import ParsedReply, ReplyDraft, ReplyEvent
from m1serve.chat.tokenizer import CALLS, THINK, THINK_END

_WHITESPACE = " \t\n\r\f\v"
_SPACE = re.compile(f"[{_WHITESPACE}]*")
_LINE_BREAK = re.compile(r"\n?")
_LINE_BREAKS = re.compile(r"\n*")
_NOTHING = re.compile("")


class ReplyParser:
    """Push text as it comes, then `finish` once; each returns the events that became certain.

    Reasoning, content and arguments are told as they come; held back are only whitespace that calls
    may follow, what may be the beginning of a tag, and a call until its name is known. Time is
    linear in the text, however it is cut.
    """

    def __init__(self, *, parse_calls: bool = True) -> None:
        self._parse_calls = parse_calls
        self._step: Callable[[], bool] = self._at_start
        self._draft = ReplyDraft()
        self._block = CallBlock(self._draft)
        self._num_blocks = 0
        self._text = ""
        self._at = 0
        self._spaces: list[str] = []
        self._skip = _NOTHING

    def push(self, text: str) -> list[ReplyEvent]:
        self._text, self._at = self._text[self._at :] + text, 0
        while self._step():
            pass
        return self._draft.take_events()

    def finish(self) -> list[ReplyEvent]:
        """The text is over: what was held back goes where it belongs."""
        rest, self._text, self._at = self._text[self._at :], "", 0
        if self._step == self._in_think:
            self._draft.is_well_formed = False
            self._draft.reason(rest)
        elif self._step == self._in_block:
            self._block.finish(rest)
        else:
            self._say("".join((*self._spaces, rest)))
            self._spaces = []
        return self._draft.take_events()

    @property
    def has_broken_call(self) -> bool:
        """See `ParsedReply`; cheap."""
        return self._draft.has_broken_call

    def parsed(self) -> ParsedReply:
        """Of everything so far; final after `finish`."""
        return self._draft.parsed()

    # Each step consumes what it can of the text and says whether the next step may go on.

    def _at_start(self) -> bool:
        if spaces := self._take(_SPACE):
            self._spaces.append(spaces)
        if self._text.startswith(THINK, self._at):
            self._at += len(THINK)
            self._spaces, self._skip = [], _LINE_BREAK
            self._draft.begin_reasoning()
            self._step = self._in_think
            return True
        if THINK.startswith(self._text[self._at : self._at + len(THINK)]):
            return False
        self._step = self._in_content
        return True

    def _take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        taken = found[0] if found else ""
        self._at += len(taken)
        return taken

    def _has_skipped(self) -> bool:
        """Over what follows a tag and belongs to nobody; not until something else is there."""
        if self._take(self._skip) and self._skip is _LINE_BREAK:
            self._skip = _NOTHING
        if self._at == len(self._text):
            return False
        self._skip = _NOTHING
        return True

    def _in_think(self) -> bool:
        if not self._has_skipped():
            return False
        end = self._text.find(THINK_END, self._at)
        if end >= 0:
            self._draft.reason(self._text[self._at : end].removesuffix("\n"))
            self._at, self._skip = end + len(THINK_END), _LINE_BREAKS
            self._step = self._in_content
            return True
        safe = len(self._text) - partial_tag(self._text, self._at, THINK_END)
        if self._text.endswith("\n", self._at, safe):
            safe -= 1
        self._draft.reason(self._text[self._at : safe])
        self._at = safe
        return False

    def _in_content(self) -> bool:
        if not self._has_skipped():
            return False
        if not self._parse_calls:
            self._say("".join((*self._spaces, self._text[self._at :])))
            self._at, self._spaces = len(self._text), []
            return False
        start = self._text.find(CALLS, self._at)
        if start < 0:
            part = partial_tag(self._text, self._at, CALLS)
            self._say_unless_calls_follow(len(self._text) - part)
            return False
        self._say_unless_calls_follow(start)
        self._at, self._spaces = start + len(CALLS), []
        self._begin_block()
        return True

    def _say_unless_calls_follow(self, end: int) -> None:
        """Whitespace at the end waits: before calls it belongs to nobody."""
        part = self._text[self._at : end]
        self._at = end
        shown = part.rstrip(_WHITESPACE)
        if shown:
            self._say("".join((*self._spaces, shown)))
            self._spaces = []
        if len(shown) < len(part):
            self._spaces.append(part[len(shown) :])

    def _begin_block(self) -> None:
        self._block = CallBlock(self._draft)
        self._num_blocks += 1
        self._draft.is_well_formed &= self._num_blocks == 1
        self._step = self._in_block

    def _in_block(self) -> bool:
        self._at = self._block.feed(self._text, self._at)
        if not self._block.is_closed:
            return False
        self._skip = _SPACE
        self._step = self._in_content
        return True

    def _say(self, text: str) -> None:
        if text:
            self._draft.is_well_formed &= self._num_blocks == 0
            self._draft.say(text)
