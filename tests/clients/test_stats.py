"""Properties and known values of the intervals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m1serve.clients.stats import Interval, is_worse_beyond_noise, paired_gain, wilson

outcomes = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0])), min_size=1, max_size=60
)


def test_wilson_matches_a_textbook_value() -> None:
    interval = wilson(8, 10)
    assert (interval.low, interval.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_wilson_of_nothing_is_no_knowledge() -> None:
    assert wilson(0, 0) == Interval(value=0.0, low=0.0, high=1.0)


@given(num=st.integers(1, 500), share=st.floats(0, 1))
def test_wilson_holds_the_rate_and_stays_within_bounds(num: int, share: float) -> None:
    interval = wilson(round(share * num), num)
    assert 0 <= interval.low <= interval.value <= interval.high <= 1


@given(num=st.integers(1, 200))
def test_wilson_narrows_with_more_tasks(num: int) -> None:
    few, many = wilson(num / 2, num), wilson(2 * num, 4 * num)
    assert many.high - many.low < few.high - few.low


@given(outcomes)
def test_the_gain_interval_holds_the_gain_and_turns_with_its_sign(
    pairs: list[tuple[float, float]],
) -> None:
    before, after = [b for b, _ in pairs], [a for _, a in pairs]
    there = paired_gain(before, after, num_resamples=200)
    back = paired_gain(after, before, num_resamples=200)
    assert there.low <= there.value <= there.high
    assert (back.value, back.low, back.high) == pytest.approx(
        (-there.value, -there.high, -there.low)
    )


def test_pairing_removes_the_noise_between_tasks() -> None:
    before = [0.0, 1.0] * 50
    after = [1.0 if i % 10 == 0 else value for i, value in enumerate(before)]
    gain = paired_gain(before, after)
    assert gain.value == pytest.approx(0.1)
    assert 0.03 < gain.low < gain.high < 0.17


def test_a_family_is_worse_only_when_its_whole_interval_is() -> None:
    assert is_worse_beyond_noise(Interval(value=-0.2, low=-0.3, high=-0.05))
    assert not is_worse_beyond_noise(Interval(value=-0.1, low=-0.3, high=0.05))


def test_unpaired_outcomes_are_refused() -> None:
    with pytest.raises(ValueError, match="2 before and 1 after"):
        paired_gain([0.0, 1.0], [1.0])
