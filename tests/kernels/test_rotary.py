"""Rotary positions in place, against the halves turned in float64.

Shapes: B rows, T tokens, H query heads, K kv heads, D head dim, R rotary pairs.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from m1serve.kernels.rotary import rotate_


def turned(x_BTHD: Tensor, cos_bTR: Tensor, sin_bTR: Tensor) -> Tensor:
    R = cos_bTR.shape[-1]
    cos, sin, x = cos_bTR.double()[:, :, None], sin_bTR.double()[:, :, None], x_BTHD.double()
    a, b, rest = x[..., :R], x[..., R : 2 * R], x[..., 2 * R :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def angles(num_rows: int, num_tokens: int, pairs: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(pairs)
    angle = 9 * torch.rand(num_rows, num_tokens, pairs, generator=generator)
    return [angle.cos().to(device), angle.sin().to(device)]


@pytest.mark.parametrize(("dtype", "bar"), [(torch.bfloat16, 2.0**-8), (torch.float32, 1e-6)])
@pytest.mark.parametrize(
    ("rows", "tokens", "rows_of_angles", "pairs"),
    [(1, 5, 1, 32), (3, 4, 1, 12), (3, 4, 3, 4), (3, 1, 3, 8), (2, 1, 1, 8)],
)
def test_the_first_channels_turn_and_the_others_stay(
    device: torch.device,
    dtype: torch.dtype,
    bar: float,
    rows: int,
    tokens: int,
    rows_of_angles: int,
    pairs: int,
) -> None:
    generator = torch.Generator().manual_seed(0)
    # q and k are views of one packed projection, beside values that nobody may touch
    packed = torch.randn(rows, tokens, 5, 64, generator=generator).to(device, dtype)
    before = packed.clone()
    q, k = packed[:, :, :3], packed[:, :, 3:4]
    cos, sin = angles(rows_of_angles, tokens, pairs, device)
    rotate_(q, k, cos, sin)
    for got, given in ((q, before[:, :, :3]), (k, before[:, :, 3:4])):
        wanted = turned(given, cos, sin)
        assert ((got.double() - wanted).abs() / wanted.abs().clamp(min=1)).max() < bar
        assert torch.equal(got[..., 2 * pairs :], given[..., 2 * pairs :])
    assert torch.equal(packed[:, :, 4], before[:, :, 4])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("k", torch.zeros(2, 3, 8), "k has shape [2, 3, 8], wanted [rows, tokens, heads, dim]"),
        ("k", torch.zeros(2, 4, 1, 8), "k has shape [2, 4, 1, 8], wanted [rows, tokens, heads"),
        ("k", torch.zeros(2, 3, 1, 8).half(), "k is torch.float16, wanted torch.float32"),
        ("q", torch.zeros(3, 2, 2, 8).transpose(0, 1), "q has strides [16, 32, 8, 1], wanted rows"),
        ("cos", torch.zeros(3, 3, 2), "cos has shape [3, 3, 2], wanted [1 or 2, 3, pairs]"),
        ("k", torch.zeros(2, 3, 1, 2), "cos turns 4 channels, k has 2"),
        ("sin", torch.zeros(1, 3, 2, device="meta"), "sin is on meta, wanted cpu"),
    ],
)
def test_bad_input_is_refused(name: str, value: Tensor, said: str) -> None:
    given = {
        "q": torch.zeros(2, 3, 2, 8),
        "k": torch.zeros(2, 3, 1, 8),
        "cos": torch.zeros(1, 3, 2),
        "sin": torch.zeros(1, 3, 2),
    }
    given[name] = value
    with pytest.raises(ValueError, match=re.escape(said)):
        rotate_(*given.values())
