"""What a task is: its public face, its id, its split, and the protocols a family implements."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from m1serve.errors import ConfigError

SPLITS = ("train", "gate", "report")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """All that an agent may see. Expected results stay with the problem."""

    task_id: str
    family: str
    split: str
    system: str
    tools: tuple[dict[str, object], ...]
    """Flat {name, description, parameters}; empty when the family has no tools."""
    user: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskId:
    family: str
    split: str
    number: int

    @classmethod
    def parse(cls, text: str, families: Sequence[str]) -> TaskId:
        family, _, rest = text.partition("/")
        split, _, number = rest.partition("/")
        if family not in families or split not in SPLITS or not number.isascii():
            raise ConfigError(_bad_id(text, families))
        if not number.isdigit() or len(number) > 12 or number != str(int(number)):
            raise ConfigError(_bad_id(text, families))
        return cls(family=family, split=split, number=int(number))

    def __str__(self) -> str:
        return f"{self.family}/{self.split}/{self.number}"


def _bad_id(text: str, families: Sequence[str]) -> str:
    return (
        f"no such task: {text!r}; wanted <family>/<split>/<number> with a family of "
        f"{', '.join(families)} and a split of {', '.join(SPLITS)}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    name: str
    arguments: Mapping[str, object]
    result: str


class Episode(Protocol):
    """The private world of one episode."""

    def call(self, name: str, arguments: dict[str, object]) -> str: ...

    @property
    def transcript(self) -> tuple[ToolUse, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a family says of a finished episode, before the format is looked at."""

    components: Mapping[str, float]
    """Each 0 or 1; the reward needs them all."""
    evidence: str
    notes: Mapping[str, float]
    """Numbers worth keeping that the reward does not need."""


class Problem(Protocol):
    """A task with its expected result."""

    @property
    def task(self) -> Task: ...

    @property
    def max_turns(self) -> int: ...

    def open(self) -> Episode: ...

    def judge(self, content: str, episode: Episode) -> Verdict: ...


def split_of(key: str) -> str:
    """The only split in which `key` (an order id, the operands of a sum, a question) may appear."""
    bucket = zlib.crc32(key.encode()) % 10
    return {0: "report", 1: "gate"}.get(bucket, "train")


class NoTools:
    """The world of a task without tools: every call is answered with an error."""

    def __init__(self) -> None:
        self._transcript: list[ToolUse] = []

    def call(self, name: str, arguments: dict[str, object]) -> str:
        result = f"error: no tool {name!r} here"
        self._transcript.append(ToolUse(name=name, arguments=arguments, result=result))
        return result

    @property
    def transcript(self) -> tuple[ToolUse, ...]:
        return tuple(self._transcript)
