"""The running side of a request: a Generation, and a Sequence for each of its choices."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from m1serve.engine.constraint import Constraint
from m1serve.engine.outbox import Outlet
from m1serve.engine.stopping import Stop, StopRules, ThinkBudget
from m1serve.engine.token_ids import TokenIds
from m1serve.types import (
    Delta,
    GenerateRequest,
    InFlight,
    Started,
    StopCause,
    TokenFlag,
    TopLogprob,
)

if TYPE_CHECKING:
    import torch

    from m1serve.engine.slots import RowSnapshot


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One choice: what it sampled so far and how much of that its row has read."""

    generation: Generation
    choice: int
    rules: StopRules
    budget: ThinkBudget | None
    constraint: Constraint | None = None
    """Its own when the request has a grammar."""
    rng: torch.Generator | None
    """Its own when the request has a seed."""
    unread: TokenIds
    """Ids its row reads before it samples: the prompt, and after a rewind what it had sampled."""
    num_read: int = 0
    num_cached: int = 0
    row: int = -1
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    """As long as `token_ids` when `is_bent`, else empty."""
    top_logprobs: list[tuple[TopLogprob, ...]] = field(default_factory=list)
    flag_at: dict[int, TokenFlag] = field(default_factory=dict)
    """Of tokens that were not simply sampled, by place."""
    num_sent: int = 0
    emit_at_s: float = 0.0
    """time.monotonic() from which its tokens are handed out"""
    stop: Stop | None = None
    is_over: bool = False
    """Its last delta was handed out."""

    @property
    def request(self) -> GenerateRequest:
        return self.generation.request

    @property
    def is_bent(self) -> bool:
        """Its tokens are not drawn from the model's own distribution."""
        return self.generation.is_bent

    @property
    def forced(self) -> list[int]:
        """Tokens that must come next, whatever is drawn."""
        if self.budget is not None and self.budget.forced:
            return self.budget.forced
        return [] if self.constraint is None else self.constraint.forced

    @property
    def rank(self) -> tuple[int, int, int]:
        """The greatest gives way first: lower priority, then whoever came last."""
        return -self.request.priority, self.generation.order, self.choice

    @property
    def is_fresh(self) -> bool:
        """It has sampled nothing, so the state of its prompt is all it needs."""
        return not self.token_ids

    @property
    def num_unread(self) -> int:
        return len(self.unread) - self.num_read

    @property
    def snapshot_points(self) -> tuple[int, ...]:
        """Lengths at which its state is worth keeping while it reads, shortest first."""
        prompt = len(self.request.prompt_ids)
        return (*sorted({n for n in self.request.snapshot_at if 0 < n < prompt}), prompt)

    @property
    def all_ids(self) -> TokenIds:
        return self.generation.prompt.extended(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.token_ids)

    def rewind(self) -> None:
        """Its row is gone; another must read everything again."""
        self.unread = self.all_ids
        self.num_read, self.row = 0, -1

    def take(self, token_id: int, logprob: float) -> None:
        """Appends a token; `stop` is set when it was the last."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        is_forced = bool(self.forced)
        if is_forced:
            self.flag_at[len(self.token_ids) - 1] = TokenFlag.FORCED
        elif self.constraint is not None and self.constraint.is_masking:
            self.flag_at[len(self.token_ids) - 1] = TokenFlag.SAMPLED | TokenFlag.MASKED
        if self.budget is not None:
            self.budget.observe(token_id)
        if self.constraint is not None:
            self.constraint.observe(token_id)
        self.stop = self.rules.after(token_id, len(self.token_ids), None if is_forced else logprob)

    def note_sampled(self, logprob: float) -> None:
        """Of the last token, under what it was drawn from; a forced one had no choice."""
        if len(self.sampled_logprobs) < len(self.token_ids):
            is_forced = self.flag_at.get(len(self.token_ids) - 1) is TokenFlag.FORCED
            self.sampled_logprobs.append(0.0 if is_forced else logprob)

    def note_top(self, ids: list[int], logprobs: list[float]) -> None:
        """The most likely tokens where the last one was drawn, as many as were asked for."""
        wanted = self.request.top_logprobs
        if wanted and len(self.top_logprobs) < len(self.token_ids):
            pairs = zip(ids[:wanted], logprobs[:wanted], strict=True)
            self.top_logprobs.append(tuple(TopLogprob(token_id=i, logprob=p) for i, p in pairs))

    def next_delta(self, weights_version: str) -> Delta:
        """Everything that was not handed out yet."""
        start, end = self.num_sent, len(self.token_ids)
        self.num_sent = end
        sampled = self.sampled_logprobs
        return Delta(
            choice=self.choice,
            token_ids=tuple(self.token_ids[start:end]),
            logprobs=tuple(self.logprobs[start:end]),
            token_flags=self._flags(start, end),
            weights_version=weights_version,
            sampled_logprobs=tuple(sampled[start:end]) if self.is_bent else None,
            top_logprobs=tuple(self.top_logprobs[start:end]) if self.top_logprobs else (),
            stop=self.stop.cause if self.stop else None,
            stop_detail=self.stop.detail if self.stop else None,
        )

    def _flags(self, start: int, end: int) -> tuple[int, ...]:
        if not self.flag_at:
            return (TokenFlag.SAMPLED.value,) * (end - start)
        return tuple(
            self.flag_at.get(place, TokenFlag.SAMPLED).value for place in range(start, end)
        )


@dataclass(slots=True, eq=False, kw_only=True)
class Generation:
    """One request while it is open: its choices, its place in the queue, its way out."""

    request: GenerateRequest
    prompt: TokenIds
    """The request's, ready for looking prefixes up."""
    outlet: Outlet
    order: int
    deadline_s: float = math.inf
    """time.monotonic() at which it is aborted"""
    is_cacheable: bool = True
    """False for scoring: it reads everything and leaves no snapshots."""
    sequences: list[Sequence] = field(default_factory=list)
    unplaced: deque[Sequence] = field(default_factory=deque)
    """Choices without a row; rewound ones first."""
    weights_version: str | None = None
    """Bound when the first choice gets a row."""
    leader: Sequence | None = None
    """The choice that is reading the prompt for all."""
    prompt_end: RowSnapshot | None = None
    """State after the prompt, while choices are still to be forked from it."""
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_logprobs: list[tuple[TopLogprob, ...]] = field(default_factory=list)
    is_started: bool = False
    is_queued: bool = False

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.prompt_logprobs and not self.is_started

    @property
    def is_bent(self) -> bool:
        sampling = self.request.sampling
        is_plain = sampling.is_trainable and sampling.top_p == 1.0
        return not is_plain or self.request.grammar is not None

    @property
    def is_open(self) -> bool:
        return not all(sequence.is_over for sequence in self.sequences)

    @property
    def follows_weights(self) -> bool:
        """Goes on with another version's weights after a switch."""
        return self.request.in_flight is InFlight.RECOMPUTE and self.request.weights_pin is None

    def start(self, *, cached_tokens: int, weights_version: str) -> None:
        """Puts `Started` on the stream, once."""
        if self.is_started:
            return
        self.is_started = True
        is_scored = self.request.prompt_logprobs
        has_top = is_scored and self.request.top_logprobs > 0
        self.outlet.put(
            Started(
                cached_tokens=cached_tokens,
                weights_version=weights_version,
                prompt_logprobs=tuple(self.prompt_logprobs) if is_scored else None,
                prompt_top_logprobs=tuple(self.prompt_top_logprobs) if has_top else None,
            )
        )

    def finish(self, sequence: Sequence, *, weights_version: str) -> None:
        """Hands out the choice's last delta."""
        sequence.is_over = True
        self.outlet.put(sequence.next_delta(weights_version))

    def keep_prompt_end(self, snapshot: RowSnapshot) -> None:
        """For the choices that are still to be forked; holds the snapshot."""
        self.drop_prompt_end()
        self.prompt_end = snapshot.hold()

    def drop_prompt_end(self) -> None:
        if self.prompt_end is not None:
            self.prompt_end.release()
            self.prompt_end = None

    def rebind(self) -> None:
        """Forgets the weights it ran on; choices still to be forked read the prompt again."""
        self.drop_prompt_end()
        self.weights_version = None
        self.forget_reading()

    def forget_reading(self) -> None:
        """Nobody reads the prompt for all any more; what was noted of it would come twice."""
        self.leader = None
        if not self.is_started:
            self.prompt_logprobs.clear()
            self.prompt_top_logprobs.clear()


ABORTED = Stop(cause=StopCause.ABORT)
