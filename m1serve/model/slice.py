"""The slice: eight layers of MiniMax-M1's own widths, with random weights, for one GPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from m1serve.model.checkpoint import empty_model
from m1serve.model.config import M1Config
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.tiny import tiny_config

SLICE_VOCAB = 32_768
M1_VOCAB = 200_064


def slice_config(vocab_size: int = SLICE_VOCAB) -> M1Config:
    """Seven lightning layers and one softmax layer, 32 experts: 91 GB in bf16."""
    alpha = 3.5565588200778455
    return replace(
        tiny_config(vocab_size),
        hidden_size=6144,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        rotary_dim=64,
        rope_theta=1e7,
        intermediate_size=9216,
        num_local_experts=32,
        max_position_embeddings=10_240_000,
        layernorm_full_attention_alpha=alpha,
        layernorm_linear_attention_alpha=alpha,
        layernorm_mlp_alpha=alpha,
    )


@torch.no_grad()
def random_model_on(
    config: M1Config, device: torch.device, dtype: torch.dtype, *, seed: int = 0
) -> M1ForCausalLM:
    """In evaluation mode, weights drawn where they live; the router is fp32."""
    model = empty_model(config, device=device, dtype=dtype)
    model.init_weights(torch.Generator(device=device).manual_seed(seed))
    return model.requires_grad_(False)
