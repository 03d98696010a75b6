"""Group-relative advantages."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m1serve.online_rl.advantages import group_advantages

rewards = st.lists(st.none() | st.floats(-10, 10), max_size=12)


def test_two_of_four_solved() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == (1.0, -1.0, -1.0, 1.0)


def test_one_of_four_solved() -> None:
    wanted = (math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3))
    assert group_advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx(wanted)


def test_a_missing_reward_is_neither_counted_nor_trained() -> None:
    assert group_advantages([1.0, None, 0.0]) == (1.0, None, -1.0)


@pytest.mark.parametrize("silent", [[], [1.0], [None, None], [1.0, None], [0.3, 0.3, 0.3]])
def test_a_group_without_a_signal_is_dropped(silent: list[float | None]) -> None:
    assert group_advantages(silent) is None


@given(rewards)
def test_advantages_are_centred_and_scaled(values: list[float | None]) -> None:
    result = group_advantages(values)
    if result is None:
        return
    assert [a is None for a in result] == [r is None for r in values]
    known = [a for a in result if a is not None]
    assert math.fsum(known) == pytest.approx(0, abs=1e-6)
    assert math.fsum(a * a for a in known) / len(known) == pytest.approx(1, rel=1e-6)


@given(rewards)
def test_a_better_attempt_never_has_a_smaller_advantage(values: list[float | None]) -> None:
    result = group_advantages(values)
    if result is None:
        return
    pairs = sorted(
        (r, a) for r, a in zip(values, result, strict=True) if r is not None and a is not None
    )
    assert all(x[1] <= y[1] for x, y in itertools.pairwise(pairs))
