"""The CISPO loss against a table worked out by hand, and its gradient."""

from __future__ import annotations

import math

import pytest
import torch

from m1serve.online_rl.cispo import cispo_loss, importance_ratio

# policy p, sampler p, advantage, norm -> min(p / q, 5) * A * norm, the factor in front of log p
TABLE = [
    (0.5, 0.5, 1.0, 0.25, 0.25),
    (0.8, 0.1, 1.0, 0.25, 1.25),
    (0.2, 0.8, 2.0, 0.25, 0.125),
    (0.1, 0.4, -1.5, 0.125, -0.046875),
    (0.9, 0.15, -2.0, 0.5, -5.0),
    (0.001, 0.9, 1.0, 1.0, 0.001 / 0.9),
]


def columns() -> tuple[torch.Tensor, ...]:
    policy, sampler, advantage, norm, factor = torch.tensor(TABLE, dtype=torch.float64).T
    return policy.log().requires_grad_(), sampler.log(), advantage, norm, factor


def test_loss_is_the_hand_computed_sum() -> None:
    logp, sampler, advantage, norm, _factor = columns()
    loss = cispo_loss(logp, sampler, advantage, norm, weight_max=5.0)
    wanted = -sum(row[4] * math.log(row[0]) for row in TABLE)
    assert loss.item() == pytest.approx(wanted, rel=1e-12)


def test_gradient_is_the_weight_alone() -> None:
    """Through log π only: a capped token keeps its gradient, the ratio has none."""
    logp, sampler, advantage, norm, factor = columns()
    cispo_loss(logp, sampler, advantage, norm, weight_max=5.0).backward()
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, -factor, rtol=1e-12, atol=0)


def test_weights_below_one_are_not_lifted() -> None:
    logp = torch.tensor([math.log(0.01)], requires_grad=True)
    one = torch.ones(1)
    cispo_loss(logp, torch.tensor([math.log(0.5)]), one, one, weight_max=5.0).backward()
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(-0.02, rel=1e-5)


def test_the_cap_is_absolute_and_for_both_signs() -> None:
    logp = torch.tensor([-0.1, -0.1], requires_grad=True)
    sampler, advantage = torch.full((2,), -9.0), torch.tensor([1.0, -1.0])
    cispo_loss(logp, sampler, advantage, torch.ones(2), weight_max=3.0).backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [-3.0, 3.0]


def test_a_broken_logprob_is_capped_not_infinite() -> None:
    ratio = importance_ratio(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]))
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-5)


def test_microbatches_add_up_to_the_minibatch() -> None:
    logp, sampler, advantage, norm, _ = columns()
    whole = cispo_loss(logp, sampler, advantage, norm, weight_max=5.0)
    parts = [
        cispo_loss(logp[s], sampler[s], advantage[s], norm[s], weight_max=5.0)
        for s in (slice(0, 2), slice(2, 6))
    ]
    assert (parts[0] + parts[1]).item() == pytest.approx(whole.item(), rel=1e-12)


def test_the_loss_of_a_seed_stays_what_it_was() -> None:
    generator = torch.Generator().manual_seed(7)
    logp, sampler = -torch.rand(2, 64, generator=generator)
    advantage = torch.randn(64, generator=generator)
    loss = cispo_loss(logp, sampler, advantage, torch.full((64,), 1 / 64), weight_max=1.5)
    assert loss.item() == pytest.approx(-0.006188162602484226, rel=1e-5)
