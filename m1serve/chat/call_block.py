"""What stands between `<tool_calls>` and its end: JSON objects to calls, anything else to content.

A state machine over text that arrives in pieces; each character is looked at a bounded number of
times, however long a call is and however it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from m1serve.chat.json_scan import JsonScanner, ScanEnd, json_string, raw_members
from m1serve.chat.reply_draft import ReplyDraft
from m1serve.chat.tokenizer import CALLS_END

_CALL_HEAD = re.compile(
    r'{ "name" : ("(?:[^"\\]|\\.)*+") , "arguments" : (?={)'.replace(" ", r"[ \t\n\r]*"), re.S
)
_JUNK_END = re.compile(rf"\n|{CALLS_END}")
_SPACE = re.compile(r"\s*")


class CallBlock:
    """One block. `feed` until `is_closed`; `finish` if the text ends before."""

    def __init__(self, draft: ReplyDraft) -> None:
        self._draft = draft
        self._step: Callable[[str, int], int] = self._between_objects
        self._scanner = JsonScanner()
        self._held: list[str] = []
        self.is_closed = False

    def feed(self, text: str, start: int) -> int:
        """Reads from `start`; returns where it stopped: behind the block, or where more text is
        needed. What lies from there on must come again."""
        while not self.is_closed:
            step, place = self._step, self._step(text, start)
            if place == start and step == self._step:
                return place
            start = place
        return start

    def finish(self, rest: str) -> None:
        """The text ended inside the block; `rest` is what `feed` left over."""
        self._draft.is_well_formed = False
        if self._step == self._in_object:
            self._draft.has_cut_call = True
            self._draft.say("".join(self._held) + rest)

    def _between_objects(self, text: str, start: int) -> int:
        found = _SPACE.match(text, start)
        place = found.end() if found else start
        if text.startswith(CALLS_END, place):
            self.is_closed = True
            return place + len(CALLS_END)
        if CALLS_END.startswith(text[place : place + len(CALLS_END)]):
            return place
        if text[place] == "{":
            self._scanner, self._held = JsonScanner(tells_nesting=True), []
            self._step = self._in_object
        else:
            self._draft.is_well_formed = False
            self._step = self._in_junk
        return place

    def _in_object(self, text: str, start: int) -> int:
        """Held back until the name is known, or to its end if members come in another order."""
        place, why = self._scanner.feed(text, start)
        self._held.append(text[start:place])
        if why is ScanEnd.NESTED:
            held = "".join(self._held)
            head = _CALL_HEAD.match(held)
            name = json_string(head[1]) if head else None
            if head and name is not None and head.end() == len(held) - 1:
                self._draft.start_call(name)
                self._scanner, self._step = JsonScanner(), self._in_arguments
                return place - 1
        elif why is not ScanEnd.OPEN:
            self._draft.has_cut_call |= why is ScanEnd.CUT
            self._take_object("".join(self._held))
            self._step = self._between_objects if why is ScanEnd.CLOSED else self._at_cut
        return place

    def _in_arguments(self, text: str, start: int) -> int:
        place, why = self._scanner.feed(text, start)
        self._draft.argue(text[start:place])
        if why is ScanEnd.CLOSED:
            self._scanner, self._held = JsonScanner(depth=1), []
            self._step = self._after_arguments
        elif why is ScanEnd.CUT:
            self._step = self._at_cut
        return place

    def _after_arguments(self, text: str, start: int) -> int:
        """The rest of the call's object; members beside name and arguments are ignored."""
        place, why = self._scanner.feed(text, start)
        self._held.append(text[start:place])
        if why is ScanEnd.CLOSED:
            self._draft.is_well_formed &= "".join(self._held).strip() == "}"
            self._draft.end_call()
            self._step = self._between_objects
        elif why is ScanEnd.CUT:
            self._step = self._at_cut
        return place

    def _at_cut(self, text: str, start: int) -> int:
        """At a `<` that ended an unfinished object: the closing tag, or junk."""
        self._draft.is_well_formed = False
        self._step = self._between_objects
        return start

    def _in_junk(self, text: str, start: int) -> int:
        """A line in the block that is no object is shown as content."""
        found = _JUNK_END.search(text, start)
        if found is not None:
            place = found.end() if found[0] == "\n" else found.start()
            self._step = self._between_objects
        else:
            place = len(text) - partial_tag(text, start, CALLS_END)
        self._draft.say(text[start:place])
        return place

    def _take_object(self, text: str) -> None:
        members = raw_members(text)
        value_of = dict(members or ())
        name = json_string(value_of.get("name", ""))
        arguments = value_of.get("arguments", "")
        if members is None or name is None or not arguments.startswith("{"):
            self._draft.is_well_formed = False
            self._draft.say(text)
            return
        self._draft.is_well_formed &= len(members) == 2
        self._draft.start_call(name)
        self._draft.argue(arguments)
        self._draft.end_call()


def partial_tag(text: str, start: int, tag: str) -> int:
    """How many characters at the end of `text`, from `start` on, may be the beginning of `tag`."""
    place = text.rfind("<", max(start, len(text) - len(tag) + 1))
    return len(text) - place if place >= 0 and tag.startswith(text[place:]) else 0
