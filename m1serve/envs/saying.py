"""What the scripted clerk says, and how often it cuts a corner."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """One turn of the clerk."""

    thought: str
    content: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortcuts:
    """Chance of each; all zero is the careful clerk."""

    hasty: Mapping[str, float] = field(default_factory=dict)
    """By family: answers at once instead of working it out."""
    ignore_policy: float = 0.0
    """Has looked the order up, acts without checking whether the policy allows it."""
    forget_fee: float = 0.0
    slip: float = 0.0
    """A wrong digit, a sloppy copy, the wrong one of two."""


CAREFUL = Shortcuts()

Clerk = Generator[Say, Sequence[str], None]
"""Yields turns; is sent the results of their calls."""
