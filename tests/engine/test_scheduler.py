"""Budgets and groups of prompt reading."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from m1serve.engine.scheduler import Want, group_by_width, planned_cost, share_budget

counts_lists = st.lists(st.integers(0, 300), max_size=20)


wants_lists = st.lists(
    st.builds(Want, num_tokens=st.integers(1, 300), cost=st.floats(1, 8)), max_size=20
)


def wants(*num_tokens: int) -> list[Want]:
    return [Want(num_tokens=n) for n in num_tokens]


def test_the_budget_goes_to_the_first_and_then_to_the_shortest() -> None:
    assert share_budget(wants(50, 100, 30), 120) == [50, 40, 30]
    assert share_budget(wants(50, 60, 60), 120) == [50, 60, 10]


def test_long_prompts_leave_half_to_those_behind_them() -> None:
    assert share_budget(wants(1_000_000, 40, 90), 120) == [60, 40, 20]
    assert share_budget(wants(1_000_000, 40), 120) == [80, 40]
    assert share_budget(wants(1_000_000), 120) == [120]
    assert share_budget(wants(1_000_000, 1_000_000, 40), 120) == [60, 20, 40]


def test_what_is_longer_than_a_step_keeps_nobody_out() -> None:
    assert planned_cost(wants(1_000_000, 40), 120) == 100
    assert planned_cost(wants(1_000_000, 1_000_000, 1_000_000), 120) == 60
    assert planned_cost(wants(50, 100), 120) == 150


def test_where_a_token_costs_more_fewer_are_read() -> None:
    assert share_budget([Want(num_tokens=900, cost=4.5)], 100) == [22]
    assert share_budget([Want(num_tokens=900, cost=4000.0)], 100) == [1]
    assert share_budget([Want(num_tokens=900, cost=4000.0)], 100, at_least=0) == [0]


@given(wants_lists, st.integers(0, 1000))
def test_the_budget_is_used_up_and_hardly_exceeded(wanted: list[Want], budget: int) -> None:
    counts = share_budget(wanted, budget)
    cost = sum(count * want.cost for count, want in zip(counts, wanted, strict=True))
    dearest = max((want.cost for want in wanted), default=0.0)
    assert cost <= max(budget, wanted[0].cost if wanted and budget else 0) + 1e-6
    if any(count < want.num_tokens for count, want in zip(counts, wanted, strict=True)) and budget:
        # a token that does not fit any more may leave so much
        assert cost > budget - 2 * dearest
    assert all(count <= want.num_tokens for count, want in zip(counts, wanted, strict=True))
    assert not (wanted and budget) or counts[0] > 0


@given(counts_lists)
def test_groups_hold_every_reader_once_and_waste_less_than_half(counts: list[int]) -> None:
    groups = group_by_width(counts)
    assert sorted(i for group in groups for i in group) == [i for i, n in enumerate(counts) if n]
    for group in groups:
        width = max(counts[i] for i in group)
        assert sum(counts[i] for i in group) * 2 > width * len(group)
