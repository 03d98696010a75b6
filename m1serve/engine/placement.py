"""Placement: who gets a row and pages next, and who gives them back when pages run out."""

from __future__ import annotations

import logging

from m1serve.engine.batch import STEP_ERRORS, VersionBatch
from m1serve.engine.generation import Generation, Sequence
from m1serve.engine.held_versions import HeldVersions
from m1serve.engine.pages import PageAllocator
from m1serve.engine.scheduler import WaitingQueue, planned_cost
from m1serve.engine.slots import RowSnapshot

logger = logging.getLogger(__name__)


class Placement:
    """Owned by the step thread."""

    def __init__(
        self,
        versions: HeldVersions,
        waiting: WaitingQueue,
        allocator: PageAllocator,
        *,
        num_slots: int,
    ) -> None:
        self._versions, self._waiting, self._allocator = versions, waiting, allocator
        self._num_slots = num_slots
        self.cached_tokens = self.num_lookups = self.num_hits = self.num_preemptions = 0

    def place(self, budget: float) -> list[tuple[Generation, Exception]]:
        """Rows for the next in the queue, as long as rows, pages and the budget last.

        Returns those that could not be given one, with what went wrong; they must be ended.
        """
        failed: list[tuple[Generation, Exception]] = []
        put_off: list[Generation] = []
        num_free = self._num_slots - self._versions.num_rows
        planned = planned_cost([want for batch in self._versions for want in batch.wants], budget)
        while num_free > 0 and (generation := self._waiting.peek()) is not None:
            sequence = generation.unplaced[0]
            if sequence.is_fresh and generation.leader is not None:
                # it comes back when its first choice has read the prompt
                self._waiting.pop()
                continue
            try:
                if self._reads_along(generation, sequence):
                    put_off.append(generation)
                    self._waiting.pop()
                    continue
                if not self._place_one(generation, sequence, budget, is_open=planned < budget):
                    break
            except STEP_ERRORS as error:
                logger.error("request_id=%s gets no row", generation.request.id, exc_info=error)
                failed.append((generation, error))
                self._waiting.pop()
                continue
            planned += sequence.num_unread
            num_free -= 1
        for generation in put_off:
            self._waiting.push(generation)
        return failed

    def _reads_along(self, generation: Generation, sequence: Sequence) -> bool:
        """A prefix of it is being read for another right now: better not to read it twice."""
        if sequence.is_fresh and generation.prompt_end is not None:
            return False
        batch = self._versions.batch_of(generation)
        hit = batch.find_prefix(sequence)
        return batch.is_reading_prefix_of(sequence, hit.num_tokens if hit else 0)

    def make_room(self, batch: VersionBatch) -> None:
        """Pages for the next token of each decoding row, at the cost of whoever came last."""
        while not batch.reserve():
            running = [sequence for held in self._versions for sequence in held.rows]
            if self._drop_prompt_end():
                continue
            assert len(running) > 1, "one sequence alone always fits: the plan was made so"
            self._preempt(max(running, key=lambda sequence: sequence.rank))

    def requeue(self, sequence: Sequence) -> None:
        """Its row is gone; it reads everything again when its turn comes."""
        sequence.rewind()
        sequence.generation.unplaced.appendleft(sequence)
        self._waiting.push(sequence.generation)

    def _place_one(
        self, generation: Generation, sequence: Sequence, budget: float, *, is_open: bool
    ) -> bool:
        """False: not in this step, and then nobody behind it either; `is_open`: it may read."""
        batch = self._versions.batch_of(generation)
        if sequence.is_fresh and generation.prompt_end is not None:
            is_placed = batch.rows.fork(sequence, generation.prompt_end)
        else:
            is_placed = is_open and self._open_row(batch, sequence, budget)
        if not is_placed:
            # nothing may wait for pages that only waiting choices hold
            is_alone = is_open and self._versions.num_rows == 0
            return (
                is_alone
                and self._drop_prompt_end()
                and self._place_one(generation, sequence, budget, is_open=True)
            )
        generation.unplaced.popleft()
        if not generation.unplaced:
            generation.drop_prompt_end()
        return True

    def _open_row(self, batch: VersionBatch, sequence: Sequence, budget: float) -> bool:
        """False: pages are short."""
        generation, hit = sequence.generation, batch.find_prefix(sequence)
        is_open = self._open_at(batch, sequence, hit, budget)
        if not is_open and hit is not None and self._versions.num_rows == 0:
            # a snapshot's last page is held beside the row's own copy of it: one page too many
            is_open = self._open_at(batch, sequence, None, budget)
        if not is_open:
            return False
        if not generation.is_started:
            # who gave way and comes back saves nothing
            self.num_lookups += 1
            self.num_hits += sequence.num_cached > 0
            self.cached_tokens += sequence.num_cached
        generation.weights_version = batch.weights_version
        if sequence.is_fresh:
            generation.leader = sequence
        if not generation.wants_prompt_logprobs:
            generation.start(
                cached_tokens=sequence.num_cached, weights_version=batch.weights_version
            )
        return True

    def _open_at(
        self,
        batch: VersionBatch,
        sequence: Sequence,
        snapshot: RowSnapshot | None,
        budget: float,
    ) -> bool:
        """Wants pages for all it has to read, and for what those beside it say meanwhile.

        With less it would soon be preempted, or preempt others.
        """
        allocator, start = self._allocator, snapshot.num_tokens if snapshot else 0
        num_tokens = len(sequence.unread)
        num_own = allocator.pages_for(num_tokens) - start // allocator.page_tokens
        # half of each step may go to others
        num_steps = int((num_tokens - start) / max(budget / 2, 1.0))
        beside = self._versions.num_rows * (1 + num_steps // allocator.page_tokens)
        if snapshot is not None:
            snapshot.hold()
        try:
            has_room = allocator.make_room(num_own + beside)
            return has_room and batch.rows.open(sequence, snapshot=snapshot)
        finally:
            if snapshot is not None:
                snapshot.release()

    def _drop_prompt_end(self) -> bool:
        """Of the last in the queue that has one: its choices read the prompt again later."""
        holders = [g for g in self._waiting if g.prompt_end is not None]
        if not holders:
            return False
        max(holders, key=lambda generation: generation.order).drop_prompt_end()
        return True

    def _preempt(self, sequence: Sequence) -> None:
        for batch in self._versions:
            if sequence in batch.rows:
                batch.rows.release(sequence)
        self.num_preemptions += 1
        if sequence.generation.leader is sequence:
            sequence.generation.forget_reading()
        self.requeue(sequence)
