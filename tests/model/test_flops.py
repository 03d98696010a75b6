"""The arithmetic of FLOPs, by hand for M1 and against the matrices of a real model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from m1serve.model.checkpoint import empty_model
from m1serve.model.directory import read_config
from m1serve.model.flops import flops_per_token, prefill_token_flops, relative_prefill_cost
from m1serve.model.tiny import tiny_config


def test_m1_decodes_at_what_one_computes_by_hand(m1_data: Path) -> None:
    flops = flops_per_token(read_config(m1_data), 1000)
    lightning = 6144 * 24576 + 2 * 6144 * 8192
    softmax = 2 * 6144 * 8192 + 2 * 6144 * 1024
    experts = 2 * 3 * 6144 * 9216 + 6144 * 32
    body = 70 * lightning + 10 * softmax + 80 * experts
    assert flops.linear == 2 * (body + 200064 * 6144)
    assert flops.linear == pytest.approx(94.3e9, rel=1e-3)
    assert flops.lightning == 70 * 64 * 5 * 128 * 128
    assert flops.lightning == pytest.approx(0.37e9, rel=1e-2)
    assert flops.softmax == 327_680 * 1000
    assert flops.total == flops.linear + flops.lightning + flops.softmax


def test_a_million_prompt_tokens_of_m1_are_259_petaflop_with_every_head(m1_data: Path) -> None:
    config = read_config(m1_data)
    tokens = 10**6
    # linear in the context, so the mean context stands for all
    body = prefill_token_flops(config, tokens // 2)
    head = flops_per_token(config, 0).linear - body.linear
    assert (body.linear + head) * tokens == pytest.approx(94e15, rel=5e-3)
    assert body.softmax * tokens == pytest.approx(164e15, rel=2e-3)
    assert body.lightning * tokens == pytest.approx(0.9e15, rel=3e-2)
    assert (body.total + head) * tokens == pytest.approx(259e15, rel=2e-3)


def test_the_linear_part_is_two_flops_a_weight_that_a_token_meets() -> None:
    config = tiny_config()
    model = empty_model(config, device="meta", dtype=torch.float32)
    met = 0
    for name, weight in model.named_parameters():
        if weight.dim() < 2 or "embed_tokens" in name:
            continue
        share = config.num_experts_per_tok / config.num_local_experts if weight.dim() == 3 else 1
        met += int(weight.numel() * share)
    assert flops_per_token(config, 0).linear == 2 * met


def test_a_prompt_token_at_an_empty_context_costs_one(m1_data: Path) -> None:
    for config in (tiny_config(), read_config(m1_data)):
        assert relative_prefill_cost(config, 0) == 1.0
        costs = [relative_prefill_cost(config, context) for context in (0, 1, 10, 10**3, 10**6)]
        assert costs == sorted(costs)
        assert len(set(costs)) == len(costs)
        rise = relative_prefill_cost(config, 2000) - 1
        assert rise == pytest.approx(2 * (relative_prefill_cost(config, 1000) - 1))


def test_m1_reads_a_token_at_a_million_for_four_and_a_half_of_the_first(m1_data: Path) -> None:
    by_hand = 1 + 327_680e6 / (91.887e9 + 0.881e9)
    assert relative_prefill_cost(read_config(m1_data), 10**6) == pytest.approx(by_hand, rel=1e-4)
