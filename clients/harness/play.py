"""Plays for the scripted engine: what an agent that knows the answers says, turn by turn. Pure."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Line = dict[str, object]
"""A line of a scripted engine's file: text, and when and at which turn it plays."""

STOP = "###STOP###"
FALLBACK: Line = {"text": "Hello, I need help with my order."}
_READS = ("get_", "find_", "list_", "search_", "calculate", "think", "transfer_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    name: str
    arguments: dict[str, object]

    @property
    def is_write(self) -> bool:
        return not self.name.startswith(_READS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one side says in one conversation; a user is told apart by its instruction."""

    cue: str
    """In every prompt of this side, and in no other's."""
    texts: tuple[str, ...]
    """Turn by turn; the last one again for every turn that is left."""
    first_turn: int = 0
    """Assistant turns that the harness puts before the first of ours."""

    def lines(self) -> list[Line]:
        turns: list[Line] = [
            {"when": self.cue, "turn": self.first_turn + i, "text": text}
            for i, text in enumerate(self.texts)
        ]
        return [*turns, {"when": self.cue, "text": self.texts[-1]}]


def call_text(calls: Sequence[Call], *, thought: str = "") -> str:
    """As the model writes calls; with a thought, as it writes most of its turns."""
    rows = "".join(
        json.dumps({"name": c.name, "arguments": c.arguments}, ensure_ascii=False) + "\n"
        for c in calls
    )
    return f"{_think(thought)}<tool_calls>\n{rows}</tool_calls>"


def say(text: str, *, thought: str = "") -> str:
    return _think(thought) + text


def agent_texts(calls: Iterable[Call], last_words: Sequence[str]) -> tuple[str, ...]:
    """One call a turn, then the answer with everything that must be said."""
    told = [call_text([call], thought=f"Next comes {call.name}.") for call in calls]
    answer = " ".join(["All done.", *last_words])
    return (*told, say(answer, thought="That was everything."))


def with_wrong_argument(calls: Sequence[Call]) -> tuple[Call, ...]:
    """The first write call gets a wrong text argument. Raises ValueError when nothing is written.

    The first text of the arguments, however deep, gets an ending that no id of a benchmark has.
    """
    spoiled = list(calls)
    for place, call in enumerate(spoiled):
        if call.is_write:
            arguments = copy.deepcopy(call.arguments)
            if _spoil(arguments):
                spoiled[place] = Call(name=call.name, arguments=arguments)
                return tuple(spoiled)
    raise ValueError("no call writes anything, so no wrong argument could be seen")


def script(parts: Iterable[Part]) -> list[Line]:
    return [line for part in parts for line in part.lines()] + [FALLBACK]


def script_text(lines: Iterable[Line]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _think(thought: str) -> str:
    return f"<think>\n{thought}\n</think>\n" if thought else ""


def _spoil(value: object) -> bool:
    if isinstance(value, dict):
        return any(_spoil_at(value, key, inner) for key, inner in list(value.items()))
    if isinstance(value, list):
        return any(_spoil_at(value, place, inner) for place, inner in enumerate(value))
    return False


def _spoil_at(container: dict[object, object] | list[object], key: object, inner: object) -> bool:
    if not isinstance(inner, str):
        return _spoil(inner)
    container[key] = inner + "-wrong"  # type: ignore[call-overload]
    return True
