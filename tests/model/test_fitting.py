"""What fits: the arithmetic of facts that were worked out by hand for eight H200."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from m1serve.model.devices import found_devices
from m1serve.model.directory import read_config
from m1serve.model.fitting import fit, num_devices_needed
from m1serve.model.footprint import Footprint, footprint

H200_BYTES = 141 * 10**9
SMALL = Footprint(num_params=1, weight_bytes=1000, state_bytes=100, kv_token_bytes=10)


def test_m1_in_bf16_on_eight_h200_leaves_three_million_tokens(m1_data: Path) -> None:
    config = read_config(m1_data)
    counted = footprint(config, weight_itemsize=2, kv_itemsize=2)
    most = config.max_position_embeddings
    eight = fit(counted, free_bytes=8 * H200_BYTES, max_context_tokens=most)
    assert round(eight.room_bytes / 1e9, 1) == 125.5
    assert 3.05e6 < eight.longest_context_tokens < 3.07e6
    assert [c.num_sequences for c in eight.concurrency] == [332, 199, 42, 11, 2]
    one = fit(counted, free_bytes=H200_BYTES, max_context_tokens=most)
    assert not one.is_enough
    assert {c.num_sequences for c in one.concurrency} == {0}
    assert num_devices_needed(counted, free_bytes=H200_BYTES, context_tokens=10**6) == 8


def test_the_last_token_and_the_last_sequence_fit_exactly() -> None:
    """1000 of weights, then 100 and 10 a token: 1400 hold one of 30 tokens, or two of 10."""
    exact = fit(
        SMALL, free_bytes=1400 * 100 // 92 + 1, max_context_tokens=64, contexts=(10, 30, 65)
    )
    assert exact.longest_context_tokens == 30
    assert [(c.context_tokens, c.num_sequences) for c in exact.concurrency] == [(10, 2), (30, 1)]


def test_a_context_never_exceeds_what_the_model_knows() -> None:
    assert fit(SMALL, free_bytes=10**9, max_context_tokens=64).longest_context_tokens == 64
    alone = replace(SMALL, kv_token_bytes=0)
    assert fit(alone, free_bytes=10**9, max_context_tokens=64).longest_context_tokens == 64


def test_no_room_for_a_state_is_no_fit() -> None:
    assert not fit(SMALL, free_bytes=1150, max_context_tokens=64).is_enough


def test_this_machine_has_a_device_with_memory() -> None:
    for device in found_devices():
        assert 0 < device.free_bytes <= device.total_bytes
