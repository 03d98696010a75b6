"""The memory of an engine is divided before anything is served, or refused with the numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from m1serve.config import EngineSettings
from m1serve.engine.memory_plan import MemoryPlan, plan_memory
from m1serve.errors import ConfigError
from m1serve.model.config import M1Config
from m1serve.model.tiny import tiny_config

MIB, GIB = 2**20, 2**30


def plan(config: M1Config, free: int = 64 * GIB, itemsize: int = 2, **changes: int) -> MemoryPlan:
    settings = EngineSettings(**{"max_model_len": 2048, "num_slots": 4, **changes})
    return plan_memory(config, settings, page_tokens=256, kv_itemsize=itemsize, free=free)


def slice_config(m1_data: Path) -> M1Config:
    """Eight layers of M1's own widths."""
    raw = json.loads((m1_data / "config.json").read_text())
    raw |= {"num_hidden_layers": 8, "attn_type_list": raw["attn_type_list"][:8]}
    return M1Config.from_dict(raw)


def test_no_more_is_taken_than_rows_can_fill() -> None:
    got = plan(tiny_config())
    # eight pages a row; one row more than there are slots, for snapshots and other versions
    assert got.num_pages == (4 + 1) * 8
    assert got.page_bytes == 256 * 2 * 2 * 16 * 2


def test_a_figure_is_kept(m1_data: Path) -> None:
    got = plan(
        slice_config(m1_data), memory_bytes=40 * GIB, max_model_len=2**20, num_slots=32,
        snapshot_bytes=4 * GIB,
    )  # fmt: skip
    assert got.num_bytes <= 40 * GIB < got.num_bytes + got.page_bytes
    assert got.state_bytes == 32 * 2 * 28 * MIB
    # a page of 256 tokens is 1 MiB here, so a sequence of 2**20 tokens takes 4 GiB
    assert got.num_pages == 36 * 1024 - 32 * 2 * 28


def test_what_does_not_fit_is_refused_with_the_numbers(m1_data: Path) -> None:
    config = slice_config(m1_data)
    with pytest.raises(ConfigError) as refusal:
        plan(config, memory_bytes=8 * GIB, max_model_len=2**20, num_slots=80, snapshot_bytes=0)
    said = str(refusal.value)
    for number in ("1048576", "4.00 GiB", "3.62 GiB", "8.00 GiB", "80 slots", "4.38 GiB"):
        assert number in said
    assert plan(config, memory_bytes=9 * GIB, max_model_len=2**20, num_slots=80, snapshot_bytes=0)


def test_less_memory_than_rows_could_fill_gives_fewer_pages(m1_data: Path) -> None:
    got = plan(slice_config(m1_data), free=2 * GIB, num_slots=8, max_model_len=256 * 1024)
    assert 1024 <= got.num_pages < 8 * 1024
