"""Each way to get the decay wrong that has been seen in the wild has a test."""

from __future__ import annotations

import math

import pytest
import torch

from m1serve.kernels.decay import slopes
from m1serve.kernels.reference import lightning_chunked


def test_m1s_published_range_of_slopes() -> None:
    first, last = slopes(64, 80, 0), slopes(64, 80, 78)
    assert first.dtype == torch.float32
    assert first[0].item() == pytest.approx(2 ** (-1 / 8) * (1 + 1e-5), rel=1e-6)
    assert first[63].item() == pytest.approx(2**-8 * (1 + 1e-5), rel=1e-6)
    assert last[63].item() == pytest.approx(2**-8 * (1 / 79 + 1e-5), rel=1e-6)


def test_layers_count_globally_softmax_layers_too() -> None:
    base = slopes(64, 80, 0).double() / (1 + 1e-5)
    for layer in (1, 6, 8, 40, 78):
        wanted = base * (1 - layer / 79 + 1e-5)
        assert torch.allclose(slopes(64, 80, layer).double(), wanted, rtol=1e-6)


def test_the_last_layer_still_decays() -> None:
    assert (slopes(64, 80, 79) > 0).all()


def test_slopes_are_rounded_once_from_float64() -> None:
    exact = [2.0 ** (-8 * (h + 1) / 64) * (1 - 11 / 79 + 1e-5) for h in range(64)]
    assert torch.equal(slopes(64, 80, 11), torch.tensor(exact, dtype=torch.float64).float())


@pytest.mark.parametrize("tp_size", [2, 8])
def test_a_rank_gets_a_slice_of_the_global_slopes(tp_size: int) -> None:
    parts = [slopes(64, 80, 5, tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)]
    assert torch.equal(torch.cat(parts), slopes(64, 80, 5))
    assert not torch.allclose(parts[0], slopes(64 // tp_size, 80, 5))


def test_other_head_counts_interleave_the_next_power_of_two() -> None:
    got = slopes(6, 2, 0).double() / (1 + 1e-5)
    wanted = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    assert torch.allclose(got, torch.tensor(wanted, dtype=torch.float64), rtol=1e-6)


def test_a_model_of_one_layer_has_slopes() -> None:
    assert slopes(2, 1, 0).tolist() == pytest.approx([2**-4 * (1 + 1e-5), 2**-8 * (1 + 1e-5)])


def test_impossible_layers_and_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="layer 8 is not in a model of 8 layers"):
        slopes(8, 8, 8)
    with pytest.raises(ValueError, match="rank 0 of 3"):
        slopes(8, 8, 0, tp_size=3)


def test_decay_over_a_chunk_is_one_exponential_not_a_power_of_a_rounded_one() -> None:
    """bf16 rounds late heads' exp(-s) to 1: a state that should shrink by e^-0.0127 would not."""
    slope = slopes(64, 80, 78)[63:]
    state = torch.ones(1, 1, 4, 4)
    nothing = torch.zeros(1, 256, 1, 4)
    _, after = lightning_chunked(nothing, nothing, nothing, slope, state, chunk=256)
    assert after[0, 0, 0, 0].item() == pytest.approx(math.exp(-256 * slope.item()), rel=1e-6)
    assert torch.exp(-slope).bfloat16().item() == 1.0
