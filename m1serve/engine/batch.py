"""VersionBatch: the model of one weights version, the rows that run on it, one step of them."""

# N decoding rows, E hidden, V vocabulary

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from m1serve.config import EngineSettings
from m1serve.engine.generation import Sequence
from m1serve.engine.prefix_cache import Hit, PrefixCache, Space
from m1serve.engine.reader import Reading, read_together
from m1serve.engine.rows import RowTable
from m1serve.engine.sampler import Drawn, DrawPlan, Sampler
from m1serve.engine.scheduler import group_by_width, share_budget
from m1serve.engine.slots import SlotPool
from m1serve.engine.stopping import Stop
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.types import StopCause

logger = logging.getLogger(__name__)

STEP_ERRORS = (RuntimeError, ValueError, ArithmeticError, LookupError, TypeError, AssertionError)
"""What a forward may raise; the sequences in it end, the engine lives on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    num_tokens: int
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
        settings: EngineSettings,
        cache: PrefixCache,
        sampler: Sampler,
    ) -> None:
        self.weights_version = weights_version
        self._model, self._cache, self._sampler = model, cache, sampler
        self._plan: DrawPlan | None = None
        self._plan_epoch = -1
        self.rows = RowTable(
            SlotPool(
                model.config,
                max_rows=settings.num_slots,
                max_tokens=settings.max_model_len,
                device=str(model.embed_tokens.weight.device),
                dtype=model.embed_tokens.weight.dtype,
            )
        )

    @property
    def num_unread(self) -> int:
        return sum(sequence.num_unread for sequence in self.rows.reading)

    # ---- prefixes ------------------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence) -> Hit | None:
        generation = sequence.generation
        if not generation.is_cacheable or generation.wants_prompt_logprobs:
            return None
        return self._cache.find(self._space(sequence), sequence.unread)

    def is_reading_prefix_of(self, sequence: Sequence, hit: Hit | None) -> bool:
        """A row is just reading a prefix that this sequence would otherwise read a second time."""
        start = hit.num_tokens if hit else 0
        ahead = [n for n in sequence.snapshot_points[:-1] if n > start]
        if not ahead or not self._keeps_at(sequence, ahead[0]):
            return False
        if sequence.generation.wants_prompt_logprobs:
            return False
        prefix, salt = sequence.unread[: ahead[0]], sequence.request.cache_salt
        return any(
            other.num_read < ahead[0]
            and other.request.cache_salt == salt
            and self._keeps_at(other, ahead[0])
            and other.unread[: ahead[0]] == prefix
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
        is_kept = self._keeps_at(sequence, num_read) and self._cache.wants(
            self._space(sequence), sequence.unread[:num_read]
        )
        if not has_forks and not is_kept:
            return
        snapshot = self.rows.pool.snapshot(sequence.row)
        if is_kept:
            self._cache.put(self._space(sequence), sequence.unread[:num_read], snapshot)
        if has_forks:
            generation.prompt_end = snapshot

    def _keep_turn(self, sequence: Sequence) -> None:
        has_failed = sequence.stop is not None and sequence.stop.cause is StopCause.ERROR
        if has_failed or not sequence.generation.is_cacheable:
            return
        space, ids = self._space(sequence), sequence.all_ids
        if not self._cache.wants(space, ids):
            return
        try:
            self._cache.put(space, ids, self.rows.pool.snapshot(sequence.row))
        except STEP_ERRORS as error:
            # the turn is complete; only the next one will have more to read
            logger.warning("request_id=%s leaves no snapshot: %s", sequence.request.id, error)

    def _space(self, sequence: Sequence) -> Space:
        return Space(weights_version=self.weights_version, salt=sequence.request.cache_salt)

    # ---- reading prompts -----------------------------------------------------------------------

    def read(self, budget_tokens: int) -> Progress:
        """Reads up to so many prompt tokens; each sequence stops where a snapshot is due."""
        order = list(self.rows.reading)
        wanted = [self._next_stop(sequence) - sequence.num_read for sequence in order]
        counts = share_budget(wanted, budget_tokens)
        failed: list[Sequence] = []
        for group in group_by_width(counts):
            failed += self._read_group(
                [Reading(sequence=order[i], num_tokens=counts[i]) for i in group]
            )
        read = [sequence for sequence in self.rows.reading if sequence.num_unread == 0]
        for sequence in read:
            self.rows.promote(sequence)
        return Progress(num_tokens=sum(counts), read=read, failed=failed)

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
        self._take(drawn)
        finished = [sequence for sequence in self.rows.decoding if sequence.stop is not None]
        for sequence in reversed(finished):
            self._keep_turn(sequence)
            self.rows.release(sequence)
        return finished

    def _decode_rows(self) -> Drawn:
        decoding, pool = self.rows.decoding, self.rows.pool
        pool.ensure(rows=len(decoding), tokens=1 + max(s.num_tokens for s in decoding))
        last_NE = pool.last_RE[: len(decoding)]
        logits_NV = self._model.logits(last_NE)
        drawn = self._sampler.draw(logits_NV, decoding, self._current_plan())
        view = pool.state.view(len(decoding))
        hidden_N1E, _ = self._model.hidden(drawn.token_N[:, None], view)
        last_NE.copy_(hidden_N1E[:, 0])
        return drawn

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
