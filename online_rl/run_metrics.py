"""The numbers a run leaves behind: what was claimed, how far the policy moved, the gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from m1serve.online_rl.cispo import importance_ratio
from m1serve.online_rl.learner import StepRecord
from m1serve.online_rl.parity import Mismatch
from m1serve.online_rl.samples import Group, group_of, is_countable
from m1serve.online_rl.scorers.base import is_solved
from m1serve.store.views import TrajectoryView

FORK_PROBABILITY = 0.8
"""Tokens the sampler gave less than this: where behaviour is decided. Elsewhere ratios are 1 and
hide the rest.
"""


def claim_metrics(views: Sequence[TrajectoryView], groups: Sequence[Group]) -> dict[str, float]:
    """Of the claimed trajectories and of the groups left after dynamic sampling."""
    rewards = [v.reward for v in views if v.reward is not None and is_countable(v)]
    lengths = [sum(len(t.completion_ids) for t in v.turns) for v in views]
    return {
        "num_trajectories": float(len(views)),
        "num_groups_claimed": float(len({group_of(v) for v in views})),
        "num_groups": float(len(groups)),
        "num_samples": float(sum(len(g.samples) for g in groups)),
        "num_trained_tokens": float(sum(g.num_trained for g in groups)),
        "success": _mean([float(is_solved(r)) for r in rewards]),
        "reward": _mean(rewards),
        "completion_tokens": _mean([float(n) for n in lengths]),
        "num_turns": _mean([float(len(v.turns)) for v in views]),
    }


def mismatch_metrics(mismatch: Mismatch) -> dict[str, float]:
    return {
        "mismatch_mean": mismatch.mean,
        "mismatch_max": mismatch.max,
        "mismatch_kl": mismatch.kl,
        "mismatch_tokens": float(mismatch.num_tokens),
    }


def step_metrics(steps: Sequence[StepRecord], *, weight_max: float) -> dict[str, float]:
    """Over all tokens of all minibatches; `fork_` rows over the forks only."""
    if not steps:
        return {}
    sampler_N = torch.cat([s.streams.sampler_logp_N for s in steps]).cpu()
    ratio_N = importance_ratio(torch.cat([s.logp_N for s in steps]).cpu(), sampler_N)
    is_fork_N = sampler_N < math.log(FORK_PROBABILITY)
    return {
        **_weights("weight", ratio_N, weight_max),
        **_weights("fork_weight", ratio_N[is_fork_N], weight_max),
        "fork_share": is_fork_N.float().mean().item(),
        "entropy": -sampler_N.mean().item(),
        "num_steps": float(len(steps)),
        "grad_norm": _mean([s.grad_norm for s in steps]),
        "grad_norm_max": max(s.grad_norm for s in steps),
        "grad_min": min(s.grad_min for s in steps),
        "grad_max": max(s.grad_max for s in steps),
        "num_model_tokens": float(sum(s.num_tokens for s in steps)),
    }


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without nan and inf, which JSON columns refuse; a missing number says the same."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _weights(name: str, ratio_N: Tensor, weight_max: float) -> dict[str, float]:
    """Quantiles of the clipped weight and the share that the cap changed; nothing of no tokens."""
    if not len(ratio_N):
        return {}
    weight_N = ratio_N.clamp(max=weight_max)
    # torch.quantile refuses more than 2^24 numbers
    p50, p95, p99 = np.quantile(weight_N.numpy(), [0.5, 0.95, 0.99]).tolist()
    return {
        f"{name}_p50": p50,
        f"{name}_p95": p95,
        f"{name}_p99": p99,
        f"{name}_max": weight_N.max().item(),
        f"{name}_capped_share": (ratio_N > weight_max).float().mean().item(),
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
