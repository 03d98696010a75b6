"""A tiny M1 with the weights of MiniMax's own reference run, and that run's outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from m1serve.model.checkpoint import disk_views
from m1serve.model.config import M1Config
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.tiny import tiny_config

ALPHA = 3.5565588200778455


@pytest.fixture(scope="session")
def golden(m1_data: Path) -> dict[str, Any]:
    """sd: weights; ids [2, 560], whose second row begins with 37 pads; fp32 logits `full` of both
    rows and `solo` of the second without its pads; bf16 logits `fb` of one forward and `decb` of
    520 tokens at once and 40 one by one.
    """
    raw: dict[str, Any] = torch.load(m1_data / "golden_tiny.pt", weights_only=True)
    return raw


@pytest.fixture(scope="session")
def golden_config() -> M1Config:
    return replace(
        tiny_config(512),
        hidden_size=128,
        num_attention_heads=8,
        rope_theta=1e7,
        intermediate_size=96,
        layernorm_full_attention_alpha=ALPHA,
        layernorm_linear_attention_alpha=ALPHA,
        layernorm_mlp_alpha=ALPHA,
    )


@pytest.fixture(scope="session")
def golden_model(golden: dict[str, Any], golden_config: M1Config) -> Callable[..., M1ForCausalLM]:
    """Makes a model of the reference's weights; keywords change its config."""

    @torch.no_grad()
    def make(**changes: Any) -> M1ForCausalLM:
        model = M1ForCausalLM(replace(golden_config, **changes)).eval()
        views = disk_views(model)
        assert views.keys() == golden["sd"].keys()
        for name, view in views.items():
            view.copy_(golden["sd"][name])
        return model

    return make
