"""Finds where JSON values end in text that arrives in pieces; cuts objects into raw members."""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import NoReturn

_OUTSIDE = re.compile(r'["{}\[\]<]')
_INSIDE = re.compile(r'["\\]')
_SPACE = re.compile(r"[ \t\n\r]*")


class ScanEnd(Enum):
    OPEN = auto()
    """More text is needed."""
    NESTED = auto()
    """The first bracket inside the value was found; scanning goes on behind it."""
    CLOSED = auto()
    """The value's last bracket was found."""
    CUT = auto()
    """A `<` outside a string: no JSON has one, so markup begins here."""


class JsonScanner:
    """Walks one object or array. Give it the text in order; it remembers where it stands."""

    def __init__(self, depth: int = 0, *, tells_nesting: bool = False) -> None:
        self._depth = depth
        self._tells_nesting = tells_nesting
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str, start: int = 0) -> tuple[int, ScanEnd]:
        """Returns the index after the value's last character so far, and why it stopped."""
        place = start
        while place < len(text):
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, place)
            if found is None:
                break
            char, place = found[0], found.end()
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\":
                self._is_escaped = True
            elif char == "<":
                return place - 1, ScanEnd.CUT
            else:
                self._depth += 1 if char in "{[" else -1
                if self._depth == 0:
                    return place, ScanEnd.CLOSED
                if self._tells_nesting and self._depth == 2:
                    self._tells_nesting = False
                    return place, ScanEnd.NESTED
        return len(text), ScanEnd.OPEN


def raw_members(text: str) -> list[tuple[str, str]] | None:
    """The members of a JSON object in order, values as written; None when it is not an object."""
    decoder = json.JSONDecoder()
    members: list[tuple[str, str]] = []
    if not is_json_object(text):
        return None
    place = _skip(text, text.index("{") + 1)
    while text[place] != "}":
        key, place = decoder.raw_decode(text, place)
        start = _skip(text, _skip(text, place) + 1)
        _, end = decoder.raw_decode(text, start)
        members.append((key, text[start:end]))
        place = _skip(text, end)
        if text[place] == ",":
            place = _skip(text, place + 1)
    return members


def is_json_object(text: str) -> bool:
    """By the standard: Python alone reads NaN and Infinity."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def json_string(text: str) -> str | None:
    """The value of a JSON string that is valid Unicode, else None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    # an escaped lone surrogate is legal JSON and can be sent to nobody
    is_sendable = isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)
    return value if is_sendable else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _skip(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return found.end() if found else place
