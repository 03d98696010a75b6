"""VersionBatch: the model of one weights version, the rows that run on it, one step of them."""

# N decoding rows, E hidden, V vocabulary

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from m1serve.engine.cache_memory import CacheMemory
from m1serve.engine.decode_step import DecodeStep
from m1serve.engine.generation import Sequence
from m1serve.engine.prefix_cache import Space
from m1serve.engine.reader import Reading, read_together
from m1serve.engine.rows import RowTable
from m1serve.engine.sampler import Drawn, DrawPlan, HostCopy, Sampler
from m1serve.engine.scheduler import Want, group_by_width, share_budget
from m1serve.engine.slots import RowSnapshot
from m1serve.engine.stopping import Stop
from m1serve.model.flops import relative_prefill_cost
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.types import StopCause

logger = logging.getLogger(__name__)

STEP_ERRORS = (RuntimeError, ValueError, ArithmeticError, LookupError, TypeError, AssertionError)
"""What a forward may raise; the sequences in it end, the engine lives on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    num_tokens: int
    cost: float
    """As `Want.cost`, of all of them"""
    read: list[Sequence]
    """They have read all they had to and decode from here on."""
    failed: list[Sequence]


class VersionBatch:
    """Owned by the step thread."""

    def __init__(
        self,
        model: M1ForCausalLM,
        *,
        weights_version: str,
        memory: CacheMemory,
        sampler: Sampler,
    ) -> None:
        self.weights_version = weights_version
        self._model, self._cache, self._sampler = model, memory.snapshots, sampler
        self._plan: DrawPlan | None = None
        self._plan_epoch = -1
        self.rows = RowTable(memory.new_pool())
        self._decode_step = DecodeStep(
            model, self.rows.pool, with_graphs=model.embed_tokens.weight.is_cuda
        )

    @property
    def wants(self) -> list[Want]:
        """Of its readers, up to where each stops next."""
        return [self._want(sequence) for sequence in self.rows.reading]

    def _want(self, sequence: Sequence) -> Want:
        num_tokens = self._next_stop(sequence) - sequence.num_read
        return Want(num_tokens=num_tokens, cost=self._cost_at(sequence.num_read))

    def _cost_at(self, context: int) -> float:
        return relative_prefill_cost(self._model.config, context)

    # ---- prefixes ------------------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence) -> RowSnapshot | None:
        generation = sequence.generation
        if not generation.is_cacheable or generation.wants_prompt_logprobs:
            return None
        return self._cache.find(self._space(sequence), sequence.unread)

    def is_reading_prefix_of(self, sequence: Sequence, start: int) -> bool:
        """A row is just reading a prefix that this sequence would otherwise read a second time.

        It has a snapshot of its first `start` tokens.
        """
        ahead = [n for n in sequence.snapshot_points[:-1] if n > start]
        if not ahead or not self._keeps_at(sequence, ahead[0]):
            return False
        if sequence.generation.wants_prompt_logprobs:
            return False
        prefix, salt = sequence.unread.array[: ahead[0]], sequence.request.cache_salt
        return any(
            other.num_read < ahead[0]
            and other.request.cache_salt == salt
            and self._keeps_at(other, ahead[0])
            and other.unread.has_prefix(prefix)
            for other in self.rows.reading
        )

    def _keeps_at(self, sequence: Sequence, num_tokens: int) -> bool:
        return (
            self._cache.is_enabled
            and sequence.generation.is_cacheable
            and num_tokens in sequence.snapshot_points
        )

    def _keep_prefix(self, sequence: Sequence) -> None:
        """Stores the state where a snapshot is due; choices may be waiting to fork from it."""
        num_read, generation = sequence.num_read, sequence.generation
        has_forks = num_read == len(sequence.request.prompt_ids) and len(generation.unplaced) > 0
        space, ids = self._space(sequence), sequence.unread
        is_kept = self._keeps_at(sequence, num_read) and self._cache.wants(space, ids, num_read)
        if not has_forks and not is_kept:
            return
        snapshot = self.rows.pool.snapshot(sequence.row, num_read)
        if is_kept:
            self._cache.put(space, ids, snapshot)
        if has_forks:
            generation.keep_prompt_end(snapshot)
        snapshot.release()

    def _keep_turn(self, sequence: Sequence) -> None:
        has_failed = sequence.stop is not None and sequence.stop.cause is StopCause.ERROR
        if has_failed or not sequence.generation.is_cacheable or not self._cache.is_enabled:
            return
        space, ids = self._space(sequence), sequence.all_ids
        if not self._cache.wants(space, ids, len(ids)):
            return
        try:
            snapshot = self.rows.pool.snapshot(sequence.row, len(ids))
        except STEP_ERRORS as error:
            # the turn is complete; only the next one will have more to read
            logger.warning("request_id=%s leaves no snapshot: %s", sequence.request.id, error)
            return
        self._cache.put(space, ids, snapshot)
        snapshot.release()

    def _space(self, sequence: Sequence) -> Space:
        return Space(weights_version=self.weights_version, salt=sequence.request.cache_salt)

    # ---- reading prompts -----------------------------------------------------------------------

    def read(self, budget: float, *, at_least: int = 1) -> Progress:
        """Reads prompt tokens that cost so much; each sequence stops where a snapshot is due.

        The first in line reads `at_least` so many, whatever they cost.
        """
        order, wants = list(self.rows.reading), self.wants
        counts = share_budget(wants, budget, at_least=at_least)
        failed: list[Sequence] = []
        for group in group_by_width(counts):
            failed += self._read_group(
                [Reading(sequence=order[i], num_tokens=counts[i]) for i in group]
            )
        read = [sequence for sequence in self.rows.reading if sequence.num_unread == 0]
        for sequence in read:
            self.rows.promote(sequence)
        cost = sum(count * want.cost for count, want in zip(counts, wants, strict=True))
        return Progress(num_tokens=sum(counts), cost=cost, read=read, failed=failed)

    def _read_group(self, readings: list[Reading]) -> list[Sequence]:
        sequences = [reading.sequence for reading in readings]
        try:
            read_together(
                self._model, self.rows.pool, readings, vocab_size=self._sampler.vocab_size
            )
            for sequence in sequences:
                self._keep_prefix(sequence)
        except STEP_ERRORS as error:
            return self._fail(sequences, error)
        return []

    def _next_stop(self, sequence: Sequence) -> int:
        ends = (n for n in sequence.snapshot_points if n > sequence.num_read)
        end = next(ends, 0)
        return end if self._keeps_at(sequence, end) else len(sequence.unread)

    # ---- decoding ------------------------------------------------------------------------------

    def reserve(self) -> bool:
        """Pages for the next token of every decoding row; False: there are not enough."""
        reserve = self.rows.pool.reserve
        return all(reserve(s.row, s.num_tokens + 1) for s in self.rows.decoding)

    def decode(self) -> list[Sequence]:
        """One token for every decoding sequence; returns those that ended, their rows freed.

        The sampled token is read at once, so the state of a finished turn includes its last token.
        """
        if not self.rows.decoding:
            return []
        try:
            drawn = self._decode_rows()
        except STEP_ERRORS as error:
            return self._fail(list(self.rows.decoding), error)
        self._take(drawn.wait())
        finished = [sequence for sequence in self.rows.decoding if sequence.stop is not None]
        for sequence in reversed(finished):
            self._keep_turn(sequence)
            self.rows.release(sequence)
        return finished

    def _decode_rows(self) -> HostCopy:
        decoding = self.rows.decoding
        logits_NV = self._model.logits(self.rows.pool.last_RE[: len(decoding)])
        drawn = self._sampler.draw(logits_NV, decoding, self._current_plan())
        # before the step, which then runs while the host deals with the tokens
        copy = drawn.start_copy()
        self._decode_step.run(drawn.token_N)
        return copy

    def _current_plan(self) -> DrawPlan:
        if self._plan is None or self._plan_epoch != self.rows.epoch:
            self._plan = self._sampler.plan(self.rows.decoding)
            self._plan_epoch = self.rows.epoch
        return self._plan

    def _take(self, drawn: Drawn) -> None:
        decoding, logprobs = self.rows.decoding, drawn.logprob_N.tolist()
        is_sound = math.isfinite(sum(logprobs))
        for sequence, token_id, logprob in zip(
            decoding, drawn.token_N.tolist(), logprobs, strict=True
        ):
            if sequence.constraint is not None and sequence.constraint.error is not None:
                sequence.stop = Stop(cause=StopCause.ERROR, detail=sequence.constraint.error)
            elif is_sound or math.isfinite(logprob):
                sequence.take(token_id, logprob)
            else:
                sequence.stop = _broken(logprob)
        if drawn.sampled_logprob_M is not None:
            bent = self._current_plan().bent
            for i, logprob in zip(bent, drawn.sampled_logprob_M.tolist(), strict=True):
                decoding[i].note_sampled(logprob)
        if drawn.top_id_NK is not None and drawn.top_logprob_NK is not None:
            ids, values = drawn.top_id_NK.tolist(), drawn.top_logprob_NK.tolist()
            for sequence, row_ids, row_values in zip(decoding, ids, values, strict=True):
                sequence.note_top(row_ids, row_values)

    def _fail(self, sequences: list[Sequence], error: Exception) -> list[Sequence]:
        logger.error(
            "a step of %s failed for %d sequences",
            self.weights_version,
            len(sequences),
            exc_info=error,
        )
        stop = failed_by(error)
        for sequence in reversed(sequences):
            sequence.stop = stop
            self.rows.release(sequence)
        return sequences


def failed_by(error: Exception) -> Stop:
    return Stop(cause=StopCause.ERROR, detail=f"{type(error).__name__}: {error}")


def _broken(logprob: float) -> Stop:
    detail = f"the model gave logprob {logprob}: its weights or this sequence's state are broken"
    return Stop(cause=StopCause.ERROR, detail=detail)
