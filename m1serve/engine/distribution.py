"""The distribution sampled from, where a request bends the model's own. Pure tensor functions.

Order as in vLLM: bias, penalties, temperature, min_p, top_k, top_p.
"""

# M bent rows, N rows, V vocabulary

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Bend:
    """Parameters of M rows as columns; a None means that no row uses it."""

    temperature_M1: Tensor
    """1 where `greedy_M`."""
    greedy_M: Tensor | None
    min_p_M1: Tensor | None
    top_k_M1: Tensor | None
    """The vocabulary's size where a row sets none."""
    top_p_M1: Tensor | None
    bias_MV: Tensor | None
    penalty: Penalty | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalty:
    presence_M1: Tensor
    frequency_M1: Tensor
    repetition_M1: Tensor
    in_prompt_MV: Tensor
    counts_MV: Tensor
    """How often each token was sampled; counted up in place."""


def bend(logits_MV: Tensor, by: Bend) -> Tensor:
    """Log-probabilities [M, V] fp32 of what is sampled from; -inf where nothing may be sampled."""
    logits_MV = logits_MV.float()
    if by.bias_MV is not None:
        logits_MV = logits_MV + by.bias_MV
    if by.penalty is not None:
        logits_MV = _penalise(logits_MV, by.penalty)
    logits_MV = logits_MV / by.temperature_M1
    if by.min_p_M1 is not None:
        floor_M1 = logits_MV.amax(-1, keepdim=True) + by.min_p_M1.log()
        logits_MV = logits_MV.masked_fill(logits_MV < floor_M1, -torch.inf)
    if by.top_k_M1 is not None or by.top_p_M1 is not None:
        logits_MV = _truncate(logits_MV, by.top_k_M1, by.top_p_M1)
    if by.greedy_M is not None:
        logits_MV = _only_best(logits_MV, by.greedy_M)
    return torch.log_softmax(logits_MV, -1)


def pick(p_NV: Tensor, u_N: Tensor) -> Tensor:
    """Token ids [N] by inverse CDF of float64 uniforms in [0, 1): a row's draw is its own."""
    cdf_NV = p_NV.double().cumsum(-1)
    total_N = cdf_NV[:, -1]
    # never the very end: there the search would leave the row
    at_N = torch.minimum(u_N * total_N, torch.nextafter(total_N, torch.zeros_like(total_N)))
    token_N1 = torch.searchsorted(cdf_NV, at_N[:, None], right=True)
    return token_N1.squeeze(1).clamp_(max=p_NV.shape[1] - 1)


def _penalise(logits_MV: Tensor, by: Penalty) -> Tensor:
    is_said_MV = by.counts_MV > 0
    is_seen_MV = is_said_MV | by.in_prompt_MV
    repeated_MV = torch.where(
        logits_MV > 0, logits_MV / by.repetition_M1, logits_MV * by.repetition_M1
    )
    logits_MV = torch.where(is_seen_MV, repeated_MV, logits_MV)
    return logits_MV - by.frequency_M1 * by.counts_MV - by.presence_M1 * is_said_MV


def _truncate(logits_MV: Tensor, top_k_M1: Tensor | None, top_p_M1: Tensor | None) -> Tensor:
    """top_p counts the mass that top_k left; the most likely token always stays."""
    sorted_MV, order_MV = logits_MV.sort(-1, descending=True)
    if top_k_M1 is not None:
        rank_V = torch.arange(sorted_MV.shape[1], device=sorted_MV.device)
        sorted_MV = sorted_MV.masked_fill(rank_V >= top_k_M1, -torch.inf)
    if top_p_M1 is not None:
        p_MV = sorted_MV.softmax(-1)
        mass_before_MV = p_MV.cumsum(-1) - p_MV
        is_out_MV = mass_before_MV >= top_p_M1
        is_out_MV[:, 0] = False
        sorted_MV = sorted_MV.masked_fill(is_out_MV, -torch.inf)
    return torch.full_like(logits_MV, -torch.inf).scatter(1, order_MV, sorted_MV)


def _only_best(logits_MV: Tensor, greedy_M: Tensor) -> Tensor:
    best_M1 = logits_MV.argmax(-1, keepdim=True)
    one_MV = torch.full_like(logits_MV, -torch.inf).scatter(1, best_M1, 0.0)
    return torch.where(greedy_M[:, None], one_MV, logits_MV)
