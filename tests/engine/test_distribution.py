"""What is sampled from, and how a token is drawn from it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m1serve.engine.distribution import Bend, Penalty, bend, pick

LOGITS = torch.tensor([[2.0, 1.0, 0.5, -1.0, -3.0]])


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def bent_by(**changes: Any) -> torch.Tensor:
    fields: dict[str, Any] = {
        "temperature_M1": column(1.0),
        "greedy_M": None,
        "min_p_M1": None,
        "top_k_M1": None,
        "top_p_M1": None,
        "bias_MV": None,
        "penalty": None,
    }
    return bend(LOGITS, Bend(**{**fields, **changes}))[0].exp()


def kept(p_V: torch.Tensor) -> list[int]:
    return (p_V > 0).nonzero()[:, 0].tolist()


def test_nothing_asked_is_the_models_own() -> None:
    assert torch.allclose(bent_by(), LOGITS[0].softmax(-1))


def test_temperature_divides_the_logits() -> None:
    assert torch.allclose(
        bent_by(temperature_M1=column(0.5)), (LOGITS[0] / 0.5).softmax(-1), atol=1e-6
    )


@pytest.mark.parametrize(("top_k", "tokens"), [(1, [0]), (3, [0, 1, 2]), (99, [0, 1, 2, 3, 4])])
def test_top_k_keeps_the_most_likely(top_k: float, tokens: list[int]) -> None:
    assert kept(bent_by(top_k_M1=column(top_k))) == tokens


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    p_V = LOGITS[0].softmax(-1)
    just_two = float(p_V[:2].sum())
    assert kept(bent_by(top_p_M1=column(just_two - 1e-4))) == [0, 1]
    assert kept(bent_by(top_p_M1=column(just_two + 1e-4))) == [0, 1, 2]
    assert kept(bent_by(top_p_M1=column(0.0))) == [0]


def test_top_p_renormalises_what_is_kept() -> None:
    p_V = bent_by(top_p_M1=column(0.7))
    assert float(p_V.sum()) == pytest.approx(1.0)
    assert float(p_V[0] / p_V[1]) == pytest.approx(math.e, rel=1e-4)


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    p_V = bent_by(top_k_M1=column(2.0), top_p_M1=column(0.74))
    # of tokens 0 and 1 alone, token 0 has 0.731: not enough
    assert kept(p_V) == [0, 1]
    assert kept(bent_by(top_k_M1=column(2.0), top_p_M1=column(0.72))) == [0]


def test_min_p_is_relative_to_the_best() -> None:
    assert kept(bent_by(min_p_M1=column(0.2))) == [0, 1, 2]
    assert kept(bent_by(min_p_M1=column(0.0))) == [0, 1, 2, 3, 4]


def test_bias_moves_a_logit() -> None:
    bias = torch.zeros(1, 5)
    bias[0, 4] = 5.0
    assert torch.allclose(bent_by(bias_MV=bias), (LOGITS[0] + bias[0]).softmax(-1))


def test_greedy_is_certain_of_the_best() -> None:
    assert bent_by(greedy_M=torch.tensor([True])).tolist() == [1, 0, 0, 0, 0]


def test_penalties_follow_their_definitions() -> None:
    penalty = Penalty(
        presence_M1=column(0.5),
        frequency_M1=column(0.25),
        repetition_M1=column(2.0),
        in_prompt_MV=torch.tensor([[False, True, False, True, False]]),
        counts_MV=torch.tensor([[3.0, 0.0, 0.0, 0.0, 1.0]]),
    )
    # repetition: seen tokens 0, 1, 3, 4; frequency and presence: sampled tokens 0 and 4 only
    expected = torch.tensor([2 / 2 - 0.75 - 0.5, 1 / 2, 0.5, -1 * 2, -3 * 2 - 0.25 - 0.5])
    assert torch.allclose(bent_by(penalty=penalty), expected.softmax(-1), atol=1e-6)


@given(
    weights=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=8).filter(
        lambda values: sum(values) > 1e-3
    ),
    u=st.one_of(
        st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, math.nextafter(1.0, 0.0)])
    ),
)
def test_a_draw_is_never_impossible(weights: list[float], u: float) -> None:
    p_V = torch.tensor([weights], dtype=torch.float32)
    token = int(pick(p_V, torch.tensor([u], dtype=torch.float64)))
    assert p_V[0, token] > 0


def test_draws_come_as_often_as_they_should() -> None:
    p_V = torch.tensor([0.5, 0.0, 0.3, 0.2])
    num = 20_000
    u_N = torch.rand(num, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = pick(p_V.expand(num, 4), u_N).bincount(minlength=4)
    assert counts[1] == 0
    assert torch.allclose(counts / num, p_V, atol=0.015)
