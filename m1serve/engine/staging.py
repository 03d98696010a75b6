"""Staging a weights version: load, checksums, golden logprobs. Runs beside what serves."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.errors import WeightsError
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.weights import golden_gap, load_version
from m1serve.types import SwapReport, VersionRef

logger = logging.getLogger(__name__)

# fp32 differs by summation order and by a router near a tie, bf16 by rounding in every layer
FP32_PARITY_MEAN_MAX, FP32_PARITY_MAX_MAX = 1e-3, 5e-2
BF16_PARITY_MEAN_MAX, BF16_PARITY_MAX_MAX = 3e-2, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A version that may serve."""

    model: M1ForCausalLM
    weights_version: str
    phases_ms: dict[str, float]
    parity_mean: float
    parity_max: float

    def accepted(self, *, switch_ms: float) -> SwapReport:
        return SwapReport(
            weights_version=self.weights_version,
            is_accepted=True,
            reason="",
            phases_ms={**self.phases_ms, "switch": switch_ms},
            parity_mean=self.parity_mean,
            parity_max=self.parity_max,
        )


def stage(
    version: VersionRef, *, tokenizer: ChatTokenizer, device: str, dtype: torch.dtype
) -> Staged:
    """Raises WeightsError for anything that must not serve, OSError when it cannot be read."""
    begin = time.perf_counter()
    model, manifest = load_version(
        Path(version.path), device=device, dtype=dtype, weights_version=version.weights_version
    )
    loaded = time.perf_counter()
    if manifest.tokenizer_digest != tokenizer.digest:
        raise WeightsError(
            f"{version.weights_version} was made for another tokenizer "
            f"({manifest.tokenizer_digest[:12]}, serving with {tokenizer.digest[:12]}): "
            "start a server of its own for it"
        )
    mean, largest = golden_gap(model.eval(), manifest)
    _check_parity(version, mean, largest, dtype)
    return Staged(
        model=model.requires_grad_(False),
        weights_version=version.weights_version,
        phases_ms={
            "stage": (loaded - begin) * 1e3,
            "verify": (time.perf_counter() - loaded) * 1e3,
        },
        parity_mean=mean,
        parity_max=largest,
    )


def swap_refused(error: Exception, *, serving: str) -> SwapReport:
    """The candidate is dropped; `serving` goes on."""
    logger.warning("weights refused, %s goes on serving: %s", serving, error)
    return SwapReport(weights_version=serving, is_accepted=False, reason=str(error), phases_ms={})


def _check_parity(version: VersionRef, mean: float, largest: float, dtype: torch.dtype) -> None:
    is_fp32 = dtype == torch.float32
    mean_max = FP32_PARITY_MEAN_MAX if is_fp32 else BF16_PARITY_MEAN_MAX
    max_max = FP32_PARITY_MAX_MAX if is_fp32 else BF16_PARITY_MAX_MAX
    # written so that nan fails
    if not (mean <= mean_max and largest <= max_max):
        raise WeightsError(
            f"{version.weights_version} does not reproduce its golden logprobs: mean gap "
            f"{mean:.2e} (at most {mean_max:.0e}), largest {largest:.2e} (at most {max_max:.0e}); "
            "its weights are not those that were measured: write the version again"
        )
