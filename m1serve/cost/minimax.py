"""Shapes of the MiniMax-M1 family: of any config, and the three that have a name here."""

from __future__ import annotations

from dataclasses import replace

from m1serve.cost.shape import Shape, Storage
from m1serve.model.config import LIGHTNING, SOFTMAX, M1Config
from m1serve.model.flops import (
    body_flops,
    flops_per_token,
    head_flops,
    key_flops,
    prefill_token_flops,
)
from m1serve.model.footprint import footprint

_SEVEN_TO_ONE = (*[LIGHTNING] * 7, SOFTMAX)

M1 = M1Config(
    vocab_size=200_064,
    hidden_size=6144,
    num_hidden_layers=80,
    attn_type_list=_SEVEN_TO_ONE * 10,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    rotary_dim=64,
    rope_theta=10_000_000,
    intermediate_size=9216,
    num_local_experts=32,
    num_experts_per_tok=2,
    rms_norm_eps=1e-5,
    max_position_embeddings=10_240_000,
    layernorm_full_attention_alpha=3.5565588200778455,
    layernorm_full_attention_beta=1.0,
    layernorm_linear_attention_alpha=3.5565588200778455,
    layernorm_linear_attention_beta=1.0,
    layernorm_mlp_alpha=3.5565588200778455,
    layernorm_mlp_beta=1.0,
    postnorm=True,
    bos_token_id=None,
    eos_token_id=None,
)
"""MiniMax-M1-40k and -80k, as their config.json says."""

SLICE = replace(M1, vocab_size=32_768, num_hidden_layers=8, attn_type_list=_SEVEN_TO_ONE)
"""A tenth of M1's depth at its full width; what one GPU of 141 GB holds in bf16."""


def shape_of(config: M1Config, *, name: str, storage: Storage) -> Shape:
    memory = footprint(
        config, weight_itemsize=storage.weight_itemsize, kv_itemsize=storage.kv_itemsize
    )
    expert_params = 3 * config.hidden_size * config.intermediate_size
    embedding_params = config.vocab_size * config.hidden_size
    return Shape(
        name=name,
        body_flops=body_flops(config),
        head_flops=head_flops(config),
        decode_state_flops=flops_per_token(config, 0).lightning,
        prefill_state_flops=prefill_token_flops(config, 0).lightning,
        decode_key_flops=key_flops(config),
        prefill_key_flops=key_flops(config),
        num_params=memory.num_params,
        weight_bytes=memory.weight_bytes,
        embedding_bytes=embedding_params * storage.weight_itemsize,
        num_expert_layers=config.num_hidden_layers,
        num_experts=config.num_local_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        expert_bytes=expert_params * storage.weight_itemsize,
        state_bytes=memory.state_bytes,
        kv_token_bytes=memory.kv_token_bytes,
    )
