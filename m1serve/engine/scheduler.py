"""Who goes next: the waiting queue and the plan of one step's prompt reading. Pure, no torch."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What a prompt has left to read."""

    num_tokens: int
    cost: float = 1.0
    """Of one token, where one at an empty context is 1."""

    @property
    def total(self) -> float:
        return self.num_tokens * self.cost


def share_budget(wants: Sequence[Want], budget: float, *, at_least: int = 1) -> list[int]:
    """How many tokens each may read in a step that costs at most `budget`.

    The first, which waited longest, leaves half to the others, the shortest of them first: whoever
    comes behind prompts of a million tokens does not wait for them. It reads `at_least` so many.
    """
    if not wants or budget < 1:
        return [0] * len(wants)
    first, *others = wants
    share = max(budget / 2, budget - sum(want.total for want in others))
    counts = [0] * len(wants)
    counts[0] = min(first.num_tokens, max(int(share / first.cost), at_least))
    left = budget - counts[0] * first.cost
    for i in sorted(range(1, len(wants)), key=lambda i: wants[i].total):
        counts[i] = min(wants[i].num_tokens, max(int(left / wants[i].cost), 0))
        left -= counts[i] * wants[i].cost
    return counts


def planned_cost(wants: Sequence[Want], budget: float) -> float:
    """What of a step's budget is spoken for; prompts of more than a step make way for others."""
    if not wants:
        return 0.0
    first, *others = (want.total for want in wants)
    return min(first, budget / 2) + sum(total for total in others if total <= budget)


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
