"""What a model costs in memory: bytes of weights, of a sequence's states, of a cached token. Pure.

Numbers in, numbers out; no tensor is made. Weights are counted under M1's on-disk names.
"""

from __future__ import annotations

from dataclasses import dataclass

from m1serve.model.config import M1Config

STATE_BYTES = ROUTER_BYTES = 4
"""fp32, whatever the weights are stored in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    num_params: int
    weight_bytes: int
    """The router in fp32, the rest in the weights' dtype."""
    state_bytes: int
    """Of one sequence: the lightning states [H, D, D] of all layers, whatever its length."""
    kv_token_bytes: int
    """Of one token: keys and values of all softmax layers."""

    def sequence_bytes(self, num_tokens: int) -> int:
        """Everything that a sequence of so many tokens keeps while it runs."""
        return self.state_bytes + num_tokens * self.kv_token_bytes


def footprint(config: M1Config, *, weight_itemsize: int, kv_itemsize: int) -> Footprint:
    """`weight_itemsize` and `kv_itemsize` are bytes of one element: 2 for bf16, 4 for fp32."""
    num_router = config.num_hidden_layers * config.num_local_experts * config.hidden_size
    num_params = num_router + _num_other_params(config)
    D, H, K = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    return Footprint(
        num_params=num_params,
        weight_bytes=num_router * ROUTER_BYTES + (num_params - num_router) * weight_itemsize,
        state_bytes=len(config.lightning_layers) * H * D * D * STATE_BYTES,
        kv_token_bytes=len(config.softmax_layers) * 2 * K * D * kv_itemsize,
    )


def _num_other_params(config: M1Config) -> int:
    E, inner = config.hidden_size, config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    # qkv_proj, output_gate, out_proj and the output norm; q, k, v and o
    lightning = E * 3 * inner + E * inner + inner * E + inner
    softmax = E * inner + 2 * E * kv + inner * E
    layer = 3 * config.num_local_experts * E * config.intermediate_size + 2 * E
    return (
        2 * config.vocab_size * E
        + E
        + len(config.lightning_layers) * lightning
        + len(config.softmax_layers) * softmax
        + config.num_hidden_layers * layer
    )
