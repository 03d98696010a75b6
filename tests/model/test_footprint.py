"""The arithmetic of memory, against a real model and against MiniMax's own index."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from m1serve.model.checkpoint import disk_views, empty_model
from m1serve.model.config import M1Config
from m1serve.model.directory import read_config
from m1serve.model.footprint import footprint
from m1serve.model.state import SequenceState
from m1serve.model.tiny import tiny_config


def test_the_counted_weights_are_those_of_the_model() -> None:
    config = tiny_config()
    model = empty_model(config, device="meta", dtype=torch.bfloat16)
    counted = footprint(config, weight_itemsize=2, kv_itemsize=2)
    views = disk_views(model).values()
    assert counted.num_params == sum(view.numel() for view in views)
    assert counted.weight_bytes == sum(view.numel() * view.element_size() for view in views)


def test_a_sequence_takes_what_its_state_allocates() -> None:
    config = tiny_config()
    counted = footprint(config, weight_itemsize=4, kv_itemsize=4)
    assert SequenceState.allocate(config, 1, 100).num_bytes == counted.sequence_bytes(100)


def test_minimax_m1_is_as_large_as_its_index_says(m1_data: Path) -> None:
    index = json.loads((m1_data / "model.safetensors.index.json").read_text())
    counted = footprint(read_config(m1_data), weight_itemsize=2, kv_itemsize=2)
    assert counted.weight_bytes == index["metadata"]["total_size"]
    assert counted.state_bytes == 280 * 2**20
    assert counted.kv_token_bytes == 40_960


def test_a_slice_of_eight_layers_keeps_an_eighth_of_the_experts(m1_data: Path) -> None:
    raw = json.loads((m1_data / "config.json").read_text())
    raw |= {"num_hidden_layers": 8, "attn_type_list": raw["attn_type_list"][:8]}
    counted = footprint(M1Config.from_dict(raw), weight_itemsize=2, kv_itemsize=2)
    assert counted.state_bytes == 28 * 2**20
    assert counted.kv_token_bytes == 4096
