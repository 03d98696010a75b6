"""Teacher-forced logprobs of a microbatch's trained tokens, the shared prefix run once.

B rows, T tokens after the prefix, E hidden, N trained tokens of all rows, row by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m1serve.model.hybrid import M1ForCausalLM
from m1serve.online_rl.packing import Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStreams:
    """What the loss needs beside the policy's own logprobs, flat over the trained tokens."""

    sampler_logp_N: Tensor
    advantage_N: Tensor
    norm_N: Tensor


def trained_logprobs(model: M1ForCausalLM, micro: Microbatch) -> Tensor:
    """log π(token | everything before it), [N] fp32; differentiable."""
    device = model.lm_head.weight.device
    prefix, start = micro.prefix_length, micro.prefix_length + 1
    width = max(len(r.sample.token_ids) for r in micro.rows) - prefix
    ids_BT = torch.zeros(len(micro.rows), width, dtype=torch.long)
    is_trained_BT = torch.zeros(len(micro.rows), width - 1, dtype=torch.bool)
    for i, row in enumerate(micro.rows):
        tail = row.sample.token_ids[prefix:]
        ids_BT[i, : len(tail)] = torch.tensor(tail)
        is_trained_BT[i, : len(tail) - 1] = torch.tensor(row.sample.is_trained[start:])
    ids_BT, is_trained_BT = ids_BT.to(device), is_trained_BT.to(device)
    state = None
    if prefix:
        prefix_1T = torch.tensor([micro.rows[0].sample.token_ids[:prefix]], device=device)
        state = model.hidden(prefix_1T)[1].expand(len(micro.rows))
    hidden_BTE, _ = model.hidden(ids_BT[:, :-1], state)
    trained_NE, token_N = hidden_BTE[is_trained_BT], ids_BT[:, 1:][is_trained_BT]
    return model.token_logprobs(trained_NE, token_N).logprob_T


def token_streams(micro: Microbatch, device: torch.device | str = "cpu") -> TokenStreams:
    """The recorded streams in the order of `trained_logprobs`."""
    logp: list[float] = []
    advantage: list[float] = []
    norm: list[float] = []
    for row in micro.rows:
        sample = row.sample
        logp += [lp for lp, on in zip(sample.logprobs, sample.is_trained, strict=True) if on]
        advantage += [sample.advantage] * sample.num_trained
        norm += [row.norm] * sample.num_trained
    return TokenStreams(
        sampler_logp_N=torch.tensor(logp, device=device),
        advantage_N=torch.tensor(advantage, device=device),
        norm_N=torch.tensor(norm, device=device),
    )


def token_versions(micro: Microbatch) -> list[str]:
    """weights_version that sampled each trained token, in the same order."""
    return [
        version
        for row in micro.rows
        for version, on in zip(row.sample.versions, row.sample.is_trained, strict=True)
        if on
    ]
