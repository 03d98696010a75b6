"""CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): clip the importance weight, never the update.

    J = E[ 1 / Σ_i |o_i|  Σ_i Σ_t  sg(r̂_it) A_i log π_θ(o_it | q, o_i,<t) ]      (4)
    r̂_it = clip(r_it, 1 − ε_low, 1 + ε_high),  r_it = π_θ(o_it) / π_sampler(o_it)   (5)

Departures and choices:
1. Eq. 5 has no effective lower bound in the paper ("ε_low large"); here there is none, and
   `weight_max` is the absolute upper bound 1 + ε_high, so that no PPO epsilon can slip in as a
   default.
2. The weight is detached: the gradient flows through log π only. Differentiating the clipped ratio
   instead would be another algorithm, with no gradient where it is clipped.
3. The denominator of r is what the sampler itself recorded, not a recomputation by the trainer.
4. log r is clamped to ±20 before exp, so that one broken token is capped instead of becoming inf or
   nan.
5. The normaliser is the trained tokens of the group, times the groups in the minibatch (a mean over
   groups).

Shapes: T = trained tokens of a microbatch, flat; all streams fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_MAX = 20.0


def importance_ratio(logp_T: Tensor, sampler_logp_T: Tensor) -> Tensor:
    """r of eq. 5, detached."""
    log_ratio_T = logp_T.detach() - sampler_logp_T
    return torch.exp(log_ratio_T.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX))


def cispo_loss(
    logp_T: Tensor,
    sampler_logp_T: Tensor,
    advantage_T: Tensor,
    norm_T: Tensor,
    *,
    weight_max: float,
) -> Tensor:
    """What these tokens contribute to −J; microbatches add up to the minibatch's loss.

    `norm_T` is 1 / (trained tokens of the token's group × groups in the minibatch).
    """
    weight_T = importance_ratio(logp_T, sampler_logp_T).clamp(max=weight_max)
    return -(weight_T * advantage_T * logp_T * norm_T).sum()
