"""The numbers of a run."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from m1serve.online_rl.forward import TokenStreams
from m1serve.online_rl.learner import StepRecord
from m1serve.online_rl.run_metrics import claim_metrics, finite, step_metrics
from m1serve.online_rl.samples import build_groups
from m1serve.store.records import TurnRecord
from m1serve.store.views import TrajectoryView
from m1serve.types import StopCause


def step(ratios: list[float], sampler: list[float], grad_norm: float = 1.0) -> StepRecord:
    sampler_N = torch.tensor(sampler).log()
    streams = TokenStreams(
        sampler_logp_N=sampler_N,
        advantage_N=torch.ones(len(ratios)),
        norm_N=torch.ones(len(ratios)),
    )
    return StepRecord(
        logp_N=sampler_N + torch.tensor(ratios).log(),
        streams=streams,
        grad_norm=grad_norm,
        grad_min=1e-12 * grad_norm,
        grad_max=0.1 * grad_norm,
        num_tokens=10,
    )


def test_weights_are_shown_over_all_tokens_and_over_forks() -> None:
    steps = [step([1.0, 1.0, 8.0], [0.99, 0.95, 0.1]), step([1.0, 2.0, 1.0], [0.9, 0.4, 0.85], 3.0)]
    metrics = step_metrics(steps, weight_max=5.0)
    assert metrics["weight_p50"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["weight_max"] == pytest.approx(5.0)
    assert metrics["weight_capped_share"] == pytest.approx(1 / 6)
    assert metrics["fork_share"] == pytest.approx(1 / 3)
    assert metrics["fork_weight_p50"] == pytest.approx(3.5)
    assert metrics["fork_weight_capped_share"] == pytest.approx(1 / 2)
    assert (metrics["grad_norm"], metrics["grad_norm_max"]) == (2.0, 3.0)
    assert metrics["grad_min"] == pytest.approx(1e-12)
    assert metrics["grad_max"] == pytest.approx(0.3)
    assert metrics["num_steps"] == 2
    assert metrics["num_model_tokens"] == 20
    wanted = -sum(map(math.log, [0.99, 0.95, 0.1, 0.9, 0.4, 0.85])) / 6
    assert metrics["entropy"] == pytest.approx(wanted, rel=1e-5)


def test_no_fork_means_no_fork_numbers() -> None:
    metrics = step_metrics([step([1.0], [0.9])], weight_max=5.0)
    assert not any(name.startswith("fork_weight") for name in metrics)
    assert step_metrics([], weight_max=5.0) == {}


def test_claims_count_only_rewards_that_mean_something(
    make_turn: Callable[..., TurnRecord], make_view: Callable[..., TrajectoryView]
) -> None:
    views = [
        make_view([make_turn([1], [2, 3])], reward=1.0),
        make_view([make_turn([1], [2])], reward=0.0),
        make_view([make_turn([1], [2])], reward=None),
        make_view([make_turn([1], [2], stop=StopCause.ABORT)], reward=0.0),
        make_view([make_turn([1], [2])], reward=1.0, group="other"),
    ]
    metrics = claim_metrics(views, build_groups(views))
    assert metrics["success"] == pytest.approx(2 / 3)
    assert metrics["num_groups_claimed"] == 2
    assert metrics["num_groups"] == 1
    assert metrics["num_samples"] == 2
    assert metrics["num_trained_tokens"] == 3
    assert metrics["completion_tokens"] == pytest.approx(6 / 5)


def test_what_is_no_number_is_left_out() -> None:
    assert finite({"a": 1.0, "b": math.nan, "c": math.inf}) == {"a": 1.0}
    assert "success" not in finite(claim_metrics([], []))


def test_a_batch_of_any_size_has_quantiles() -> None:
    """torch.quantile refuses more than 2^24 numbers; 400 answers of 40,000 tokens are that many."""
    num = 2**24 + 1
    record = StepRecord(
        logp_N=torch.zeros(1).expand(num),
        streams=TokenStreams(
            sampler_logp_N=torch.zeros(1).expand(num),
            advantage_N=torch.zeros(1),
            norm_N=torch.zeros(1),
        ),
        grad_norm=1.0,
        grad_min=1.0,
        grad_max=1.0,
        num_tokens=num,
    )
    assert step_metrics([record], weight_max=5.0)["weight_p99"] == 1.0
