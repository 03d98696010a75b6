"""Stop strings over a stream of text: nothing of one is ever emitted, wherever it is cut."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """The first place where any string completes wins; of several that end there, the longest."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = sorted((s for s in strings if s), key=len, reverse=True)
        self._prefixes = [_Prefix(string) for string in self._strings]
        self._held = ""
        self._hit: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns what may be shown and the stop string that was hit; after a hit, nothing."""
        if self._hit is not None:
            return "", self._hit
        if not self._strings or not text:
            return text, None
        whole = self._held + text
        ends = [
            (place + len(string), -len(string), string)
            for string in self._strings
            if (place := whole.find(string)) >= 0
        ]
        if ends:
            end, _, string = min(ends)
            self._held, self._hit = "", string
            return whole[: end - len(string)], string
        shown = len(whole) - max(prefix.push(text) for prefix in self._prefixes)
        self._held = whole[shown:]
        return whole[:shown], None

    def flush(self) -> str:
        """What was held back, once the stream ended without a hit."""
        held, self._held = self._held, ""
        return held


class _Prefix:
    """How much of a string the text so far ends with (Knuth, Morris, Pratt): a few steps a
    character, whatever the string and the text repeat."""

    __slots__ = ("_borders", "_length", "_string")

    def __init__(self, string: str) -> None:
        self._string = string
        self._borders = [0] * len(string)
        """Of each beginning: the longest shorter beginning that it ends with."""
        length = 0
        for place in range(1, len(string)):
            length = self._borders[place] = self._longer(length, string[place])
        self._length = 0

    def push(self, text: str) -> int:
        """`text` must not complete the string. Returns the length, in characters."""
        size = len(self._string)
        if len(text) >= size:
            # what came before is out of reach
            self._length, text = 0, text[len(text) - size + 1 :]
        for char in text:
            self._length = self._longer(self._length, char)
        return self._length

    def _longer(self, length: int, char: str) -> int:
        while length and self._string[length] != char:
            length = self._borders[length - 1]
        return length + (self._string[length] == char)
