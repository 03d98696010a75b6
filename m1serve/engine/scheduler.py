"""Who goes next: the waiting queue and the plan of one step's prompt reading. Pure, no torch."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from m1serve.engine.generation import Generation

MAX_PADDING = 2
"""Rows read together differ in length by less than this factor."""


class WaitingQueue:
    """Generations with choices that have no row yet: higher priority first, then by arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Generation]] = []

    def push(self, generation: Generation) -> None:
        if generation.is_queued:
            return
        generation.is_queued = True
        key = (-generation.request.priority, generation.order, generation)
        heapq.heappush(self._heap, key)

    def peek(self) -> Generation | None:
        """The next one; finished and emptied ones are dropped on the way."""
        while self._heap:
            generation = self._heap[0][2]
            if generation.unplaced:
                return generation
            self.pop()
        return None

    def pop(self) -> None:
        heapq.heappop(self._heap)[2].is_queued = False

    def __iter__(self) -> Iterator[Generation]:
        return (entry[2] for entry in self._heap if entry[2].unplaced)

    @property
    def num_not_started(self) -> int:
        return sum(not generation.is_started for generation in self)


def share_budget(num_unread: Sequence[int], budget_tokens: int) -> list[int]:
    """How many tokens each prompt may read now: first come, first served; zeros at the end."""
    counts = []
    for wanted in num_unread:
        counts.append(min(wanted, budget_tokens))
        budget_tokens -= counts[-1]
    return counts


def group_by_width(counts: Sequence[int]) -> list[list[int]]:
    """Indices of non-zero counts in groups that waste less than half on padding."""
    order = sorted((i for i, count in enumerate(counts) if count), key=lambda i: -counts[i])
    groups: list[list[int]] = []
    for i in order:
        if groups and counts[i] * MAX_PADDING > counts[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
