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
        num_free = self._num_slots - self._versions.num_rows
        planned = planned_cost([want for batch in self._versions for want in batch.wants], budget)
        while num_free > 0 and (generation := self._waiting.peek()) is not None:
            sequence = generation.unplaced[0]
            if sequence.is_fresh and generation.leader is not None:
                # it comes back when its first choice has read the prompt
                self._waiting.pop()
                continue
            try:
                if not self._place_one(generation, sequence, has_budget=planned < budget):
                    break
            except STEP_ERRORS as error:
                logger.error("request_id=%s gets no row", generation.request.id, exc_info=error)
                failed.append((generation, error))
                self._waiting.pop()
                continue
            planned += sequence.num_unread
            num_free -= 1
        return failed

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

    def _place_one(self, generation: Generation, sequence: Sequence, *, has_budget: bool) -> bool:
        """False: not in this step, and then nobody behind it either."""
        batch = self._versions.batch_of(generation)
        if sequence.is_fresh and generation.prompt_end is not None:
            is_placed = batch.rows.fork(sequence, generation.prompt_end)
        else:
            is_placed = has_budget and self._open_row(batch, sequence)
        if not is_placed:
            # nothing may wait for pages that only waiting choices hold
            is_alone = has_budget and self._versions.num_rows == 0
            return (
                is_alone
                and self._drop_prompt_end()
                and self._place_one(generation, sequence, has_budget=True)
            )
        generation.unplaced.popleft()
        if not generation.unplaced:
            generation.drop_prompt_end()
        return True

    def _open_row(self, batch: VersionBatch, sequence: Sequence) -> bool:
        """False: pages are short, or a prefix of it is being read right now."""
        generation, hit = sequence.generation, batch.find_prefix(sequence)
        if batch.is_reading_prefix_of(sequence, hit.num_tokens if hit else 0):
            return False
        is_open = self._open_at(batch, sequence, hit)
        if not is_open and hit is not None and self._versions.num_rows == 0:
            # a snapshot's last page is held beside the row's own copy of it: one page too many
            is_open = self._open_at(batch, sequence, None)
        if not is_open:
            return False
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
        self, batch: VersionBatch, sequence: Sequence, snapshot: RowSnapshot | None
    ) -> bool:
        """Wants pages for all it has to read, and one for each of those that run beside it.

        With less it would soon be preempted, or preempt others.
        """
        allocator = self._allocator
        num_shared = snapshot.num_tokens // allocator.page_tokens if snapshot else 0
        num_own = allocator.pages_for(len(sequence.unread)) - num_shared
        if snapshot is not None:
            snapshot.hold()
        try:
            has_room = allocator.make_room(num_own + self._versions.num_rows)
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
