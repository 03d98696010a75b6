"""What the journal carries: one record a finished turn, and what closes or judges a session.

Written by the process that owns the engine stream, read by the sidecar. Values only, no database.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from m1serve.types import HistoryRule, Mode, Sampling, StopCause, TokenFlag, VersionSpan

BROKEN = frozenset({StopCause.ABORT, StopCause.ERROR})
"""Stops after which a completion is no sample of the policy."""


class SessionSource(StrEnum):
    """How a turn came to its session."""

    NAMED = "named"
    """By a header, the path, or metadata."""
    INFERRED = "inferred"
    """The client named none; exactly one running conversation has the history it sent."""
    RETRY = "retry"
    """A declared retry of a first request, put beside the attempt it repeats."""
    NEW = "new"
    """Nobody had this history before."""
    AMBIGUOUS = "ambiguous"
    """Several conversations had, and nothing told them apart: a session of its own, never
    trained."""
    UNKNOWN = "unknown"
    """Recorded before sources were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One choice of one request, exactly as sampled."""

    turn_id: str
    """uuid4 hex; the idempotency key of the turn itself"""
    request_id: str
    """Begins with the x-request-id of its response, and is unique whatever a proxy or client says
    """
    session_id: str
    group_key: str | None
    task_id: str | None
    tenant_id: str
    key_id: str
    model_id: str
    mode: Mode
    consent: bool
    created_at: float
    """Unix seconds of the request's arrival"""
    choice: int
    num_choices: int
    history_rule: HistoryRule
    request_hash: str
    """sha256 of model, messages, tools and sampling: equal for a client's retry"""
    retry_count: int
    """x-stainless-retry-count, 0 when absent"""
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampled_logprobs: tuple[float, ...] | None
    token_flags: tuple[int, ...]
    version_spans: tuple[VersionSpan, ...]
    sampling: Sampling
    stop: StopCause
    stop_detail: str | None
    finish_reason: str
    was_delivered: bool
    """The last byte was handed to the client's connection. A turn is journalled before that, and a
    TurnsDelivered behind it says so.
    """
    cached_tokens: int
    tokenizer_digest: str
    template_digest: str
    numerics_digest: str
    ttft_ms: float
    total_ms: float
    session_source: SessionSource = SessionSource.UNKNOWN

    def trainable_tokens(self) -> list[bool]:
        """Per completion token: sampled by the model and by nothing else, from its own
        distribution at temperature 1, with a logprob, in a completion that was not broken off, and
        not in the run for which a repetition stop cut it.

        The one rule: the ledger counts by it and the trainer masks by it.
        """
        if not self.sampling.is_trainable or self.stop in BROKEN:
            return [False] * len(self.completion_ids)
        end = self._num_before_repetition()
        return [
            place < end and flag == TokenFlag.SAMPLED and math.isfinite(logprob)
            for place, (flag, logprob) in enumerate(
                zip(self.token_flags, self.logprobs, strict=True)
            )
        ]

    def _num_before_repetition(self) -> int:
        """Completion tokens before the run of a repetition stop; all where there was none."""
        if self.stop is not StopCause.REPETITION:
            return len(self.completion_ids)
        sampled = [i for i, flag in enumerate(self.token_flags) if flag & TokenFlag.SAMPLED]
        told = self.stop_detail or ""
        num_run = int(told) if told.isdecimal() else 0
        # without its length nobody knows where the run began
        return sampled[-num_run] if 0 < num_run <= len(sampled) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsDelivered:
    """Follows the turns of a request in the same journal, once their answer was handed over."""

    session_id: str
    tenant_id: str
    turn_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded:
    session_id: str
    tenant_id: str
    at: float
    reason: str
    """end (the client said so) or idle"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackGiven:
    """A client's own reward: feedback, never a verifier's result."""

    feedback_id: str
    tenant_id: str
    key_id: str
    at: float
    session_id: str | None
    turn_id: str | None
    metric: str
    value: float
    comment: str = ""
    request_id: str | None = None
    """Of the completion it is about, all its choices."""
    source: str = "client"
    """Whose judgement it is, in the client's words."""


JournalRecord = TurnRecord | TurnsDelivered | SessionEnded | FeedbackGiven


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """A record with its place in the journal: (writer, seq) makes ingestion idempotent."""

    writer: str
    """uuid4 hex of the writing process"""
    seq: int
    record: JournalRecord = field(repr=False)
