"""What the ledger keeps of an answer, what its versions are, and what scorers make of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from m1serve.types.generation import StopCause


class Mode(StrEnum):
    """What may happen to a turn: train it, only measure with it, or keep nothing but counters."""

    TRAIN = "train"
    EVAL = "eval"
    OFF = "off"


class HistoryRule(StrEnum):
    EXACT = "exact"
    TEMPLATE = "template"


class Drift(StrEnum):
    """How a turn's prompt relates to the turns before it in its session."""

    ROOT = "root"
    EXTEND = "extend"
    REWRITE_LAST = "rewrite_last"
    EDIT = "edit"
    FORK = "fork"
    SIDE = "side"


class VersionState(StrEnum):
    CANDIDATE = "candidate"
    VERIFIED = "verified"
    GATED = "gated"
    CANARY = "canary"
    ACTIVE = "active"
    RETIRED = "retired"
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"


class Slot(StrEnum):
    STABLE = "stable"
    CANARY = "canary"
    EVAL = "eval"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) of a completion were sampled from `weights_version`."""

    start: int
    end: int
    weights_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    name: str
    arguments: str
    """JSON text of an object, exactly as the model wrote it."""
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One assistant turn as a scorer sees it: decoded from the ledger, not a client's text."""

    turn_id: str
    text: str
    """Everything the model wrote, markup included, end-of-sentence excluded."""
    reasoning: str | None
    content: str
    tool_calls: tuple[ToolCall, ...]
    is_well_formed: bool
    """At most one leading think block; call lines are JSON objects with name and arguments."""
    stop: StopCause
    num_tokens: int


class RewardStatus(StrEnum):
    OK = "ok"
    UNCOMPUTABLE = "uncomputable"
    TIMEOUT = "timeout"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    value: float | None
    """None when it could not be computed; never 0 in its place."""
    status: RewardStatus = RewardStatus.OK
    components: Mapping[str, float] = field(default_factory=dict)
    evidence: str = ""
    """What the scorer saw, for a person to read."""
