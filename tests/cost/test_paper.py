"""The report's figure and claim: the points that were read off it, the sums that fit them, ours."""

from __future__ import annotations

import pytest

from m1serve.cost.claim import examine_claim
from m1serve.cost.minimax import M1, shape_of
from m1serve.cost.paper import (
    FIGURE_TFLOP,
    FIGURE_TOKENS,
    RL_DOLLARS,
    RL_GPU_HOURS,
    figure_curves,
)
from m1serve.cost.rivals import r1_absorbed, r1_expanded
from m1serve.cost.shape import Storage

STORAGE = Storage()
CLAIM = examine_claim(
    shape_of(M1, name="MiniMax-M1", storage=STORAGE),
    expanded=r1_expanded(STORAGE),
    absorbed=r1_absorbed(STORAGE),
)


def test_the_points_lie_at_seventeen_lengths() -> None:
    assert len(FIGURE_TOKENS) == 17
    assert (FIGURE_TOKENS[0], FIGURE_TOKENS[1], FIGURE_TOKENS[-1]) == (1024, 9216, 131_072)
    assert {len(points) for points in FIGURE_TFLOP.values()} == {17}


@pytest.mark.parametrize("name", FIGURE_TFLOP)
def test_the_sums_go_through_every_point(name: str) -> None:
    curve = figure_curves()[name]
    for num_tokens, tflop in zip(FIGURE_TOKENS, FIGURE_TFLOP[name], strict=True):
        assert curve.at(num_tokens) / 1e12 == pytest.approx(tflop, abs=0.1)


@pytest.mark.parametrize(
    ("name", "fixed", "pair"),
    [
        ("DeepSeek-R1", 75.4e9, 3.50e6),
        ("Qwen3-235B-A22B", 43.0e9, 2.31e6),
        ("MiniMax-M1", 104.5e9, 0.1966e6),
    ],
)
def test_the_sums_are_the_fits_of_the_curves(name: str, fixed: float, pair: float) -> None:
    curve = figure_curves()[name]
    assert curve.fixed == pytest.approx(fixed, rel=1e-3)
    assert curve.pair == pytest.approx(pair, rel=1e-3)


def test_a_slope_is_the_difference_of_a_curve() -> None:
    curve = figure_curves()["DeepSeek-R1"]
    assert curve.at(1001) - curve.at(999) == 2 * curve.slope(1000)


@pytest.mark.parametrize(
    ("num_tokens", "token", "token_absorbed", "all_tokens", "all_absorbed", "figure"),
    [
        (16_384, 0.645, 0.285, 0.853, 0.458, 0.812),
        (32_768, 0.445, 0.167, 0.645, 0.285, 0.584),
        (65_536, 0.290, 0.098, 0.445, 0.167, 0.385),
        (100_000, 0.222, 0.072, 0.344, 0.120, 0.292),
        (131_072, 0.189, 0.060, 0.290, 0.098, 0.244),
    ],
)
def test_shares_of_r1(
    num_tokens: int,
    token: float,
    token_absorbed: float,
    all_tokens: float,
    all_absorbed: float,
    figure: float,
) -> None:
    share = next(share for share in CLAIM.shares if share.num_tokens == num_tokens)
    assert share.token_expanded == pytest.approx(token, abs=6e-4)
    assert share.token_absorbed == pytest.approx(token_absorbed, abs=6e-4)
    assert share.generation_expanded == pytest.approx(all_tokens, abs=6e-4)
    assert share.generation_absorbed == pytest.approx(all_absorbed, abs=6e-4)
    assert share.figure == pytest.approx(figure, abs=6e-4)


def test_the_figure_ends_at_128k() -> None:
    beyond = CLAIM.shares[-1]
    assert (beyond.num_tokens, beyond.figure, beyond.figure_token) == (1_000_000, None, None)


def test_the_rl_budget_is_two_dollars_a_gpu_hour() -> None:
    assert RL_GPU_HOURS == 512 * 504
    price = RL_DOLLARS / RL_GPU_HOURS
    assert price == pytest.approx(2.07, abs=0.005)
