"""The gated RMSNorm, fused and in torch, against its formula in float64.

Shapes: T tokens, I inner.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from m1serve.kernels.norm import gated_rms_norm

Norm = Callable[[Tensor, Tensor, Tensor, float], Tensor]
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}
DTYPES = list(TOLERANCE)
EPS = 1e-6


def in_torch(x_TI: Tensor, gate_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
    return gated_rms_norm(x_TI.cpu(), gate_TI.cpu(), weight_I.cpu(), eps)


def fused(x_TI: Tensor, gate_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
    if x_TI.is_cuda:
        return gated_rms_norm(x_TI, gate_TI, weight_I, eps)
    from m1serve.kernels.norm_triton import GatedRMSNorm

    y_TI: Tensor = GatedRMSNorm.apply(x_TI, gate_TI, weight_I, eps)
    return y_TI


def formula(x_TI: Tensor, gate_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
    x_TI, gate_TI, weight_I = (t.double() for t in (x_TI, gate_TI, weight_I))
    return (
        x_TI
        / (x_TI.square().mean(1, keepdim=True) + eps).sqrt()
        * weight_I
        / (1 + (-gate_TI).exp())
    )


def inputs(
    num_tokens: int, inner: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """x and gate are rows of wider tensors."""
    generator = torch.Generator().manual_seed(inner)
    x, gate = torch.randn(2, num_tokens, inner + 8, generator=generator).to(device, dtype)
    weight = 1 + torch.randn(inner, generator=generator).to(device, dtype) / 4
    return x[:, :inner], gate[:, 8:], weight


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


@pytest.mark.parametrize("norm", [fused, in_torch])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "inner"), [(1, 1), (3, 96), (5, 1000), (300, 64), (2, 8192)]
)
def test_forward_and_backward_equal_the_formula(
    device: torch.device, norm: Norm, dtype: torch.dtype, num_tokens: int, inner: int
) -> None:
    leaves = [t.detach().requires_grad_() for t in inputs(num_tokens, inner, dtype, device)]
    wanted = formula(*leaves, EPS)
    dy = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    wanted_grads = torch.autograd.grad(wanted, leaves, dy.double())
    got = norm(*leaves, EPS)
    assert got.dtype == dtype
    assert relative(got.to(device), wanted) < TOLERANCE[dtype]
    grads = torch.autograd.grad(got, leaves, dy.to(got.device))
    for grad, wanted_grad, leaf in zip(grads, wanted_grads, leaves, strict=True):
        assert grad.dtype == leaf.dtype
        # at one value a token, dx is what eps leaves of a difference of equals
        if inner > 1 or leaf is not leaves[0]:
            assert relative(grad, wanted_grad.double()) < 2 * TOLERANCE[dtype]


def test_the_backward_repeats_bit_for_bit(device: torch.device) -> None:
    leaves = [t.detach().requires_grad_() for t in inputs(300, 256, torch.bfloat16, device)]
    first, second = (torch.autograd.grad(fused(*leaves, EPS).sum(), leaves) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_an_fp32_attention_output_takes_bf16_weights_and_gate(device: torch.device) -> None:
    x, gate, weight = inputs(4, 128, torch.bfloat16, device)
    leaves = [t.detach().requires_grad_() for t in (x.float(), gate, weight)]
    got = fused(*leaves, EPS)
    assert got.dtype == torch.float32
    assert relative(got, formula(*leaves, EPS)) < 1e-6
    grads = torch.autograd.grad(got.sum(), leaves)
    assert [g.dtype for g in grads] == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_a_token_does_not_see_its_neighbours(device: torch.device) -> None:
    x, gate, weight = inputs(3, 96, torch.float32, device)
    alone = fused(x[1:2], gate[1:2], weight, EPS)
    x[0], gate[2] = torch.nan, torch.nan
    assert torch.equal(fused(x, gate, weight, EPS)[1:2], alone)


def test_zeros_stay_zeros(device: torch.device) -> None:
    x, gate, weight = inputs(2, 64, torch.float32, device)
    leaf = torch.zeros_like(x).requires_grad_()
    got = fused(leaf, gate, weight, EPS)
    (dx,) = torch.autograd.grad(got.sum(), leaf)
    assert torch.equal(got, torch.zeros_like(got))
    assert dx.isfinite().all()


@pytest.mark.parametrize("norm", [fused, in_torch])
def test_no_tokens_have_a_gradient(device: torch.device, norm: Norm) -> None:
    leaves = [t.detach().requires_grad_() for t in inputs(0, 64, torch.float32, device)]
    got = norm(*leaves, EPS)
    grads = torch.autograd.grad(got.sum(), leaves)
    assert got.shape == grads[0].shape == (0, 64)
    assert torch.equal(grads[2], torch.zeros_like(grads[2]))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("x", torch.zeros(4), "x has shape [4], wanted [tokens, inner]"),
        ("x", torch.zeros(4, 3, 2), "x has shape [4, 3, 2], wanted [tokens, inner]"),
        ("x", torch.zeros(4, 8).double(), "x is torch.float64, wanted one of"),
        ("x", torch.zeros(8, 4).T, "x has stride 4 along its last dim, wanted 1"),
        ("gate", torch.zeros(4, 9), "gate has shape [4, 9], wanted [4, 8]: that of x"),
        ("gate", torch.zeros(4, 8).long(), "gate is torch.int64, wanted one of"),
        ("gate", torch.zeros(4, 8, device="meta"), "gate is on meta, wanted cpu"),
        ("weight", torch.zeros(4), "weight has shape [4], wanted [8]"),
    ],
)
def test_bad_input_is_refused(name: str, value: Tensor, said: str) -> None:
    given = {"x": torch.zeros(4, 8), "gate": torch.zeros(4, 8), "weight": torch.zeros(8)}
    given[name] = value
    with pytest.raises(ValueError, match=re.escape(said)):
        gated_rms_norm(*given.values())


@pytest.mark.gpu
def test_a_token_too_wide_for_a_program_is_refused(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("only CUDA has the limit")
    x = torch.zeros(1, 8193, device=device)
    with pytest.raises(ValueError, match="x has 8193 values a token, wanted at most 8192"):
        gated_rms_norm(x, x, x[0])
