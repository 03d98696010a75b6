"""Budgets and groups of prompt reading."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from m1serve.engine.scheduler import group_by_width, share_budget

counts_lists = st.lists(st.integers(0, 300), max_size=20)


def test_the_budget_goes_to_those_who_came_first() -> None:
    assert share_budget([50, 100, 30], 120) == [50, 70, 0]


@given(counts_lists, st.integers(0, 1000))
def test_the_budget_is_used_up_and_never_exceeded(wanted: list[int], budget: int) -> None:
    counts = share_budget(wanted, budget)
    assert sum(counts) == min(sum(wanted), budget)
    assert all(count <= want for count, want in zip(counts, wanted, strict=True))
    assert sum(0 < count < want for count, want in zip(counts, wanted, strict=True)) <= 1


@given(counts_lists)
def test_groups_hold_every_reader_once_and_waste_less_than_half(counts: list[int]) -> None:
    groups = group_by_width(counts)
    assert sorted(i for group in groups for i in group) == [i for i, n in enumerate(counts) if n]
    for group in groups:
        width = max(counts[i] for i in group)
        assert sum(counts[i] for i in group) * 2 > width * len(group)
