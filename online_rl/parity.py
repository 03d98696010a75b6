"""Do trainer and sampler agree? Measured before the first step: a gap is a bug, not learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from m1serve.model.hybrid import M1ForCausalLM
from m1serve.online_rl.forward import token_streams, token_versions, trained_logprobs
from m1serve.online_rl.packing import Row, pack_microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Over the tokens of the rows that `weights_version` sampled."""

    weights_version: str
    num_tokens: int
    mean: float
    """Mean |log π_trainer − log π_sampler|"""
    max: float
    kl: float
    """KL(sampler ‖ trainer), the k3 estimator r − 1 − log r with r = π_trainer / π_sampler"""


def main_version(rows: Sequence[Row], preferred: str) -> str:
    """The version to compare with: the preferred one if it sampled anything here, else the most
    frequent.
    """
    counts: dict[str, int] = {}
    for row in rows:
        for version, on in zip(row.sample.versions, row.sample.is_trained, strict=True):
            if on:
                counts[version] = counts.get(version, 0) + 1
    return preferred if preferred in counts else max(counts, key=lambda v: counts[v])


@torch.no_grad()
def measure_mismatch(
    model: M1ForCausalLM, rows: Sequence[Row], *, weights_version: str, max_rows: int
) -> Mismatch:
    """`model` holds the weights of `weights_version`; tokens of other versions are left out."""
    gaps = []
    for micro in pack_microbatches(rows, max_rows):
        logp_N = trained_logprobs(model, micro)
        gap_N = (logp_N - token_streams(micro, logp_N.device).sampler_logp_N).cpu()
        gaps.append(gap_N[torch.tensor([v == weights_version for v in token_versions(micro)])])
    gap_N = torch.cat(gaps)
    return Mismatch(
        weights_version=weights_version,
        num_tokens=len(gap_N),
        mean=gap_N.abs().mean().item(),
        max=gap_N.abs().max().item(),
        kl=(torch.exp(gap_N) - 1 - gap_N).mean().item(),
    )
