"""What an engine can do, how it is doing, and what became of the weights it was given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from m1serve.types.generation import InFlight


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRef:
    weights_version: str
    """`<model_id>@<n>`"""
    path: str
    """The version directory, with `serving/` in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport:
    weights_version: str
    """What serves now: the new version when accepted, the old one when not."""
    is_accepted: bool
    reason: str
    """'' when accepted; else what was wrong with the candidate."""
    phases_ms: Mapping[str, float]
    """stage, verify, switch; milliseconds"""
    parity_mean: float | None = None
    """Mean |logprob - golden logprob| over the manifest's golden sequences."""
    parity_max: float | None = None
    is_deferred: bool = False
    """Not accepted and nothing is wrong with it: no room to hold it yet, load it again later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    max_model_len: int
    vocab_size: int
    max_top_logprobs: int
    in_flight: frozenset[InFlight]
    has_prompt_logprobs: bool
    has_grammar: bool
    has_penalties: bool
    has_reasoning_budget: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    num_running: int
    num_waiting: int
    num_slots: int
    versions: tuple[str, ...]
    """Held at this moment, newest last."""
    sampled_tokens: int
    """Since start, as the next three."""
    prefilled_tokens: int
    cached_tokens: int
    num_swaps: int
    num_preemptions: int = 0
    """Sequences that gave their memory back and read everything again later."""
    prefix_lookups: int = 0
    """Sequences that looked for a snapshot to start from."""
    prefix_hits: int = 0
    num_snapshots: int = 0
    """Kept at this moment, as the next three."""
    snapshot_bytes: int = 0
    num_pages: int = 0
    """Of keys and values, in all."""
    num_free_pages: int = 0
