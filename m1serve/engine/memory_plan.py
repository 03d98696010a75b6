"""How a local engine divides its memory: states of rows, pages of keys, snapshots. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from m1serve.config import EngineSettings
from m1serve.errors import ConfigError
from m1serve.model.config import M1Config
from m1serve.model.footprint import footprint

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    num_slots: int
    page_tokens: int
    num_pages: int
    page_bytes: int
    """Keys and values of a page in all softmax layers."""
    state_bytes: int
    """Of the rows of all versions that may be held at once."""
    snapshot_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.state_bytes + self.snapshot_bytes + self.num_pages * self.page_bytes


def plan_memory(
    config: M1Config, settings: EngineSettings, *, page_tokens: int, kv_itemsize: int, free: int
) -> MemoryPlan:
    """Divides `settings.memory_bytes`, or as much of the `free` bytes as rows can ever fill.

    Weights and activations are not part of it. ConfigError, with the numbers, when not even one
    sequence of `max_model_len` tokens fits.
    """
    sizes = footprint(config, weight_itemsize=kv_itemsize, kv_itemsize=kv_itemsize)
    page_bytes = page_tokens * sizes.kv_token_bytes
    pages_a_row = -(-settings.max_model_len // page_tokens)
    state_bytes = settings.num_slots * settings.max_held_versions * sizes.state_bytes
    fixed_bytes = state_bytes + settings.snapshot_bytes
    budget = free if settings.memory_bytes is None else settings.memory_bytes
    # versions and snapshots share the pages: one sequence more than there are slots
    most = settings.num_slots * pages_a_row + pages_a_row
    affordable = max(budget - fixed_bytes, 0) // page_bytes if page_bytes else most
    if affordable < pages_a_row:
        raise ConfigError(_too_little(settings, budget, state_bytes, pages_a_row * page_bytes))
    return MemoryPlan(
        num_slots=settings.num_slots,
        page_tokens=page_tokens,
        num_pages=min(most, affordable),
        page_bytes=page_bytes,
        state_bytes=state_bytes,
        snapshot_bytes=settings.snapshot_bytes,
    )


def memory_for(
    config: M1Config,
    *,
    num_slots: int,
    num_tokens: int,
    snapshot_bytes: int = 0,
    kv_itemsize: int = 4,
    num_versions: int = 2,
) -> int:
    """The `memory_bytes` that leaves pages for so many tokens (a multiple of a page's)."""
    sizes = footprint(config, weight_itemsize=kv_itemsize, kv_itemsize=kv_itemsize)
    states = num_slots * num_versions * sizes.state_bytes
    return states + snapshot_bytes + num_tokens * sizes.kv_token_bytes


def _too_little(settings: EngineSettings, budget: int, state_bytes: int, row_bytes: int) -> str:
    left = budget - state_bytes - settings.snapshot_bytes
    source = "is free" if settings.memory_bytes is None else "is engine.memory_bytes"
    return (
        f"one sequence of engine.max_model_len={settings.max_model_len} tokens needs "
        f"{row_bytes / _GIB:.2f} GiB of keys and values, and {max(left, 0) / _GIB:.2f} GiB are "
        f"left: {budget / _GIB:.2f} GiB {source}, the states of {settings.num_slots} slots "
        f"(engine.num_slots) in {settings.max_held_versions} versions take "
        f"{state_bytes / _GIB:.2f} GiB and snapshots {settings.snapshot_bytes / _GIB:.2f} GiB "
        "(engine.snapshot_bytes). Lower max_model_len, num_slots or snapshot_bytes, or give it "
        "more memory"
    )
