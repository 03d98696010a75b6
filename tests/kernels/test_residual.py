"""Branches added and normed in one pass, against the torch operations, whose roundings they keep.

Shapes: N tokens, E hidden, F ff of an expert, P picks a token.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from m1serve.kernels.residual import (
    Normed,
    Picks,
    Sum,
    rms_norm,
    rms_norm_of_sum,
    swiglu_weighted,
)

ALPHA, EPS = 3.5565588200778455, 1e-5
SIZES = [(1, 1), (1, 64), (5, 100), (70, 24), (2, 6144)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def normal(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    return torch.randn(*shape, generator=generator).to(device, dtype)


def fused(x: Tensor | Sum, weight_E: Tensor, *, keeps_sum: bool = False) -> Normed:
    from m1serve.kernels.residual_triton import fused_norm

    return fused_norm(x, weight_E, EPS, keeps_sum=keeps_sum)


def total(picks: Picks) -> Tensor:
    from m1serve.kernels.residual_triton import sum_picks

    return sum_picks(*picks)


def assert_same(got: Tensor, wanted: Tensor) -> None:
    """To the bit in half precision on a CPU; else but for the order of sums and exp's last bit."""
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    if got.dtype == torch.float32:
        # a GPU's exp, division and square root are good to a few units of the last place
        torch.testing.assert_close(got, wanted, rtol=1e-5 if got.is_cuda else 1e-6, atol=3e-6)
    elif got.is_cuda:
        assert (got == wanted).float().mean() > 0.99
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-3)
    else:
        assert (got == wanted).float().mean() > 0.998
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "hidden"), SIZES)
def test_the_norm_of_a_sum_is_that_of_torch(
    device: torch.device, dtype: torch.dtype, num_tokens: int, hidden: int
) -> None:
    weight = 1 + normal(hidden, device=device, dtype=dtype) / 4
    both = normal(2, num_tokens, hidden, device=device, dtype=dtype)
    x = Sum(both[0], both[1], ALPHA, 0.75)
    with torch.enable_grad():
        wanted_x = both[0] * ALPHA + both[1] * 0.75
        wanted = F.rms_norm(wanted_x.float(), (hidden,), weight.float(), EPS).to(dtype)
    got = fused(x, weight, keeps_sum=True)
    assert_same(got.x, wanted_x)
    assert_same(got.normed, wanted)
    assert torch.equal(fused(x, weight).normed, got.normed)
    assert_same(fused(wanted_x, weight).normed, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_placed", [True, False])
@pytest.mark.parametrize(("num_tokens", "hidden"), SIZES)
def test_picks_are_added_in_their_order_and_rounded_once(
    device: torch.device, dtype: torch.dtype, is_placed: bool, num_tokens: int, hidden: int
) -> None:
    y_ME = normal(3 * num_tokens, hidden, device=device, dtype=dtype)
    place = torch.randperm(3 * num_tokens, generator=torch.Generator().manual_seed(1)).to(device)
    picks = Picks(y_ME, place if is_placed else None, 3)
    rows = y_ME[place] if is_placed else y_ME
    wanted = rows.float().view(num_tokens, 3, hidden)
    assert_same(total(picks), (wanted[:, 0] + wanted[:, 1] + wanted[:, 2]).to(dtype))
    residual = normal(num_tokens, hidden, device=device, dtype=dtype)
    weight = torch.ones(hidden, device=device, dtype=dtype)
    together = fused(Sum(residual, picks, ALPHA, 1.0), weight, keeps_sum=True)
    apart = fused(Sum(residual, total(picks), ALPHA, 1.0), weight, keeps_sum=True)
    assert torch.equal(together.x, apart.x)
    assert torch.equal(together.normed, apart.normed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_picks", "inner"), [(1, 1), (6, 24), (7, 1030), (131, 9)])
def test_swiglu_and_the_weight_round_as_torch(
    device: torch.device, dtype: torch.dtype, num_picks: int, inner: int
) -> None:
    from m1serve.kernels.residual_triton import swiglu

    h = normal(num_picks, 2 * inner, device=device, dtype=dtype) * 4
    weight = torch.rand(num_picks, 1, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.enable_grad():
        wanted = swiglu_weighted(h, weight)
    assert_same(swiglu(h, weight), wanted)


def test_a_token_does_not_see_its_neighbours(device: torch.device) -> None:
    both = normal(2, 3, 96, device=device, dtype=torch.bfloat16)
    weight = torch.ones(96, device=device, dtype=torch.bfloat16)
    alone = fused(Sum(both[0, 1:2], both[1, 1:2], ALPHA, 1.0), weight).normed
    both[0, 0], both[1, 2] = torch.nan, torch.nan
    assert torch.equal(fused(Sum(both[0], both[1], ALPHA, 1.0), weight).normed[1:2], alone)


def test_leading_dims_stay_and_no_tokens_are_fine(device: torch.device) -> None:
    weight = torch.ones(32, device=device)
    for shape in ((2, 3, 32), (0, 32)):
        x = Sum(torch.ones(shape, device=device), torch.ones(shape, device=device), 1.0, 1.0)
        assert fused(x, weight, keeps_sum=True).x.shape == shape
        assert fused(x, weight).normed.shape == shape


def test_a_cpu_keeps_the_torch_operations_and_their_gradients() -> None:
    device = torch.device("cpu")
    both = normal(2, 4, 16, device=device, dtype=torch.float64).float().requires_grad_()
    weight = torch.ones(16, requires_grad=True)
    x = Sum(both[0], both[1], ALPHA, 0.5)
    wanted = both[0] * ALPHA + both[1] * 0.5
    got = rms_norm_of_sum(x, weight, EPS)
    assert torch.equal(got.x, wanted)
    assert torch.equal(got.normed, F.rms_norm(wanted, (16,), weight, EPS))
    assert torch.equal(rms_norm(x, weight, EPS), got.normed)
    assert torch.equal(rms_norm_of_sum(wanted, weight, EPS).x, wanted)
    grads = torch.autograd.grad(got.normed.sum(), (both, weight))
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.zeros(4, 3), "x has shape [4, 3] and weight [8], wanted [..., hidden] and [hidden]"),
        (
            Sum(torch.zeros(4, 8), torch.zeros(3, 8), 1.0, 1.0),
            "branch has shape [3, 8], wanted [4, 8] as residual",
        ),
        (
            Sum(torch.zeros(4, 8), Picks(torch.zeros(7, 8), None, 2), 1.0, 1.0),
            "picks have shape [7, 8], wanted [8, 8]: 2 a token of x [4, 8]",
        ),
        (
            Sum(torch.zeros(4, 8), torch.zeros(4, 8, device="meta"), 1.0, 1.0),
            "branch is on meta, wanted cpu",
        ),
    ],
)
def test_bad_input_is_refused(x: Tensor | Sum, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        rms_norm(x, torch.ones(8), EPS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_fuses_without_gradients_and_differentiates_with_them() -> None:
    device = torch.device("cuda")
    both = normal(2, 65, 6144, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.ones(6144, device=device, dtype=torch.bfloat16, requires_grad=True)
    x = Sum(both[0], both[1], ALPHA, 1.0)
    unfused = rms_norm(x, weight, EPS)
    assert torch.autograd.grad(unfused.float().sum(), weight)[0].isfinite().all()
    with torch.no_grad():
        assert_same(rms_norm(x, weight, EPS), unfused.detach())
