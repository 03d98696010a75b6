"""What fits on a device beside the weights: how long a context, how many sequences of it. Pure.

A subtraction: activations, graphs and fragmentation are the share that is kept back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from m1serve.model.footprint import Footprint

RESERVED = 0.08
"""Of the free memory, kept for all that is neither weights, states nor cached tokens."""
CONTEXTS = (2_048, 8_192, 65_536, 262_144, 1_048_576)


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    context_tokens: int
    num_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Of one model on one device, or on equal shares of several."""

    room_bytes: int
    """Left for sequences; negative: by so much the weights are too large"""
    longest_context_tokens: int
    """Of one sequence that has the room to itself, at most the model's own maximum"""
    concurrency: tuple[Concurrency, ...]

    @property
    def is_enough(self) -> bool:
        """The weights and a sequence."""
        return self.longest_context_tokens > 0


def fit(
    footprint: Footprint,
    *,
    free_bytes: int,
    max_context_tokens: int,
    contexts: Sequence[int] = CONTEXTS,
) -> Fit:
    """`free_bytes` of a device, or of several that share weights, states and tokens."""
    room_bytes = int(free_bytes * (1 - RESERVED)) - footprint.weight_bytes
    after_state = room_bytes - footprint.state_bytes
    token_bytes = footprint.kv_token_bytes
    # a model of lightning layers alone keeps nothing a token
    longest = after_state // token_bytes if token_bytes else max_context_tokens
    return Fit(
        room_bytes=room_bytes,
        longest_context_tokens=min(max(0, longest), max_context_tokens) if after_state >= 0 else 0,
        concurrency=tuple(
            Concurrency(
                context_tokens=tokens,
                num_sequences=max(0, room_bytes // max(1, footprint.sequence_bytes(tokens))),
            )
            for tokens in contexts
            if tokens <= max_context_tokens
        ),
    )


def num_devices_needed(footprint: Footprint, *, free_bytes: int, context_tokens: int) -> int:
    """Devices of so much free memory that hold the weights and one sequence in equal shares."""
    wanted = footprint.weight_bytes + footprint.sequence_bytes(context_tokens)
    return -(-wanted // max(1, int(free_bytes * (1 - RESERVED))))
