"""Parity of a model of random weights, made where it is measured: what of M1 one GPU can hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from m1serve.model.checkpoint import require_memory
from m1serve.model.config import M1Config
from m1serve.model.parity import ParityReport, chunk_lengths, measure_parity, serve
from m1serve.model.slice import random_model_on


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRun:
    rows: int = 8
    """Sequences with a random prompt each, served at once."""
    prompt_tokens: int = 1024
    sampled_tokens: int = 128
    """Of each row; they are what is compared."""
    chunk: int = 256
    """Prompt tokens that serving reads at once."""
    head_scale: float = 4.0
    """The head is multiplied by it: at 1 random logits are nearly flat, where no mismatch shows."""
    seed: int = 0


def random_parity(
    config: M1Config, run: RandomRun, *, device: torch.device, dtype: torch.dtype
) -> ParityReport:
    """WeightsError when the weights would not fit."""
    require_memory(config, device=device, dtype=dtype)
    model = random_model_on(config, device, dtype, seed=run.seed)
    model.lm_head.weight.mul_(run.head_scale)
    generator = torch.Generator(device=device).manual_seed(run.seed)
    shape = (run.rows, run.prompt_tokens)
    prompt_BP = torch.randint(config.vocab_size, shape, generator=generator, device=device)
    chunks = chunk_lengths(run.prompt_tokens, run.chunk)
    served = serve(model, prompt_BP, run.sampled_tokens, chunks=chunks, generator=generator)
    return measure_parity(model, served, prompt=run.prompt_tokens)
