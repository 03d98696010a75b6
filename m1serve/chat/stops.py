"""Stop strings over a stream of text: nothing of one is ever emitted, wherever it is cut."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """The first place where any string completes wins; of several that end there, the longest."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = sorted((s for s in strings if s), key=len, reverse=True)
        self._prefixes = {s[:size] for s in self._strings for size in range(1, len(s))}
        self._longest = max(map(len, self._strings), default=1)
        self._held = ""
        self._hit: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns what may be shown and the stop string that was hit; after a hit, nothing."""
        if self._hit is not None:
            return "", self._hit
        if not self._strings:
            return text, None
        text = self._held + text
        ends = [
            (place + len(string), -len(string), string)
            for string in self._strings
            if (place := text.find(string)) >= 0
        ]
        if ends:
            end, _, string = min(ends)
            self._held, self._hit = "", string
            return text[: end - len(string)], string
        sizes = range(min(self._longest - 1, len(text)), 0, -1)
        keep = next((size for size in sizes if text[-size:] in self._prefixes), 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back, once the stream ended without a hit."""
        held, self._held = self._held, ""
        return held
