"""What a model costs in arithmetic: FLOPs of a token at a context, read or decoded. Pure.

1 MAC = 2 FLOPs. Counted: matrix products, attention over the keys, the lightning recurrence, the
head. Not counted: norms, activations, rotary positions, softmax, the embedding's look-up.
"""

from __future__ import annotations

from dataclasses import dataclass

from m1serve.model.config import M1Config

PREFILL_CHUNK_TOKENS = 256
"""Lightning attention reads a prompt in chunks of so many tokens, each a full square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFlops:
    """FLOPs of one decoded token, by what they depend on."""

    linear: int
    """Projections, the top experts, the router and the head: the same at any context."""
    lightning: int
    """The lightning layers' recurrence: the same at any context."""
    softmax: int
    """Scores and weighted sums of the softmax layers: proportional to the context."""

    @property
    def total(self) -> int:
        return self.linear + self.lightning + self.softmax


def flops_per_token(config: M1Config, context: int) -> TokenFlops:
    """Decoding one token that attends to `context` keys; its logits are computed."""
    return TokenFlops(
        linear=body_flops(config) + head_flops(config),
        lightning=len(config.lightning_layers) * _decode_flops(config),
        softmax=key_flops(config) * context,
    )


def prefill_token_flops(config: M1Config, context: int) -> TokenFlops:
    """Reading one prompt token that attends to `context` keys; no logits."""
    return TokenFlops(
        linear=body_flops(config),
        lightning=len(config.lightning_layers) * _chunk_flops(config),
        softmax=key_flops(config) * context,
    )


def relative_prefill_cost(config: M1Config, context: int) -> float:
    """How many times the FLOPs of a prompt token at an empty context one at `context` keys costs.

    1.0 at an empty context and linear from there. A ratio of FLOPs, not of time: softmax attention
    and matrix products reach different shares of the device's peak.
    """
    return prefill_token_flops(config, context).total / prefill_token_flops(config, 0).total


def body_flops(config: M1Config) -> int:
    """Of one token: all matrix products but the head."""
    E, inner = config.hidden_size, config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    lightning = E * 3 * inner + E * inner + inner * E
    softmax = E * inner + 2 * E * kv + inner * E
    experts = config.num_experts_per_tok * 3 * E * config.intermediate_size
    router = E * config.num_local_experts
    return 2 * (
        len(config.lightning_layers) * lightning
        + len(config.softmax_layers) * softmax
        + config.num_hidden_layers * (experts + router)
    )


def head_flops(config: M1Config) -> int:
    """Of one token's logits."""
    return 2 * config.vocab_size * config.hidden_size


def key_flops(config: M1Config) -> int:
    """Of one query and one key in all softmax layers: the score and the weighted sum."""
    return len(config.softmax_layers) * 4 * config.num_attention_heads * config.head_dim


def lightning_prefill_flops(config: M1Config) -> int:
    """Of one prompt token in all lightning layers."""
    return len(config.lightning_layers) * _chunk_flops(config)


def _decode_flops(config: M1Config) -> int:
    # decay and k v^T update the state, q reads it: 1 + 2 + 2 for each of its D x D numbers
    return config.num_attention_heads * 5 * config.head_dim**2


def _chunk_flops(config: M1Config) -> int:
    # q k^T and its product with v inside the chunk; q times the state, and the state's update
    D = config.head_dim
    return config.num_attention_heads * (4 * PREFILL_CHUNK_TOKENS * D + 4 * D * D)
