"""Shape: the numbers of a decoder that its cost depends on, and what follows from them.

All counts are of one sequence or one token of the whole model, over all its layers. Attention is
causal: the token at position i (from 1) attends to i keys, itself included.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """In how many bytes an element is kept."""

    weight_itemsize: int = 1
    kv_itemsize: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    name: str
    body_flops: int
    """Of one token: all matrix products but the head, with its top experts and the router."""
    head_flops: int
    decode_state_flops: int
    """Of one decoded token in layers whose work does not grow with the context."""
    prefill_state_flops: int
    decode_key_flops: int
    """Of one decoded query and one key."""
    prefill_key_flops: int
    num_params: int
    weight_bytes: int
    embedding_bytes: int
    """A step reads a row of it a token, which is not counted."""
    num_expert_layers: int
    num_experts: int
    """Routed ones of a layer; shared experts are read by every token and belong to the body."""
    num_experts_per_tok: int
    expert_bytes: int
    """Of one routed expert of one layer."""
    state_bytes: int
    """Of one sequence, whatever its length."""
    kv_token_bytes: int

    def decode_flops(self, context: int) -> int:
        """One token that attends to `context` keys, with its logits."""
        fixed = self.body_flops + self.head_flops + self.decode_state_flops
        return fixed + self.decode_key_flops * context

    def generation_flops(self, num_tokens: int, *, prompt_tokens: int = 0) -> int:
        """Decoding so many tokens behind a prompt: the exact sum of `decode_flops`."""
        num_pairs = num_tokens * prompt_tokens + num_tokens * (num_tokens + 1) // 2
        return num_tokens * self.decode_flops(0) + self.decode_key_flops * num_pairs

    def prefill_flops(self, num_tokens: int, *, num_logits: int = 1) -> int:
        """Reading a sequence from its start; serving wants one token's logits, training all."""
        token = self.body_flops + self.prefill_state_flops
        num_pairs = num_tokens * (num_tokens + 1) // 2
        attention = self.prefill_key_flops * num_pairs
        return num_tokens * token + attention + num_logits * self.head_flops

    def sequence_bytes(self, num_tokens: int) -> int:
        """What a sequence of so many tokens keeps in memory: its states and its cache."""
        return self.state_bytes + num_tokens * self.kv_token_bytes

    def experts_touched(self, batch: int) -> float:
        """Expected number of a layer's experts that `batch` tokens meet under uniform routing."""
        missed = (1 - self.num_experts_per_tok / self.num_experts) ** batch
        return self.num_experts * (1 - missed)

    def step_weight_bytes(self, batch: int) -> float:
        """Weights that one step over `batch` tokens reads: the body, the head, experts touched."""
        layer_experts_bytes = self.num_expert_layers * self.expert_bytes
        body = self.weight_bytes - self.embedding_bytes - self.num_experts * layer_experts_bytes
        return body + self.experts_touched(batch) * layer_experts_bytes

    def decode_bytes(self, context: int, *, batch: int) -> float:
        """What one step of `batch` sequences moves: weights, caches read, states both ways."""
        sequence = context * self.kv_token_bytes + 2 * self.state_bytes
        return self.step_weight_bytes(batch) + batch * sequence

    def equal_context(self, other: Shape) -> float:
        """The context beyond which a decoded token costs less here than in `other`.

        0 where it does at any context, infinite where it never does.
        """
        return _crossing(
            self.decode_flops(0) - other.decode_flops(0),
            other.decode_key_flops - self.decode_key_flops,
        )

    def equal_generation(self, other: Shape) -> float:
        """The length beyond which generating that many tokens costs less here than in `other`."""
        # n tokens attend to (n + 1) / 2 keys each in the mean
        return max(0.0, 2 * self.equal_context(other) - 1)


def _crossing(extra_fixed: int, saved_per_key: int) -> float:
    if saved_per_key > 0:
        return max(0.0, extra_fixed / saved_per_key)
    return 0.0 if saved_per_key == 0 and extra_fixed < 0 else float("inf")
