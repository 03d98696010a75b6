"""Few tokens times a weight, against float64. Shapes: N tokens, E in, O out, V vocabulary."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from m1serve.kernels.linear import MAX_TOKENS, fp32_logits, linear, linears

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def inputs(
    num_tokens: int, num_in: int, num_out: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, num_in, generator=generator).to(device, dtype)
    weight = torch.randn(num_out, num_in, generator=generator) / num_in**0.5
    return x, weight.to(device, dtype)


def multiplied(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    from m1serve.kernels.linear_triton import multiply

    return multiply(x, [weight], dtype)[0]


@pytest.mark.parametrize(
    ("num_tokens", "num_in", "num_out"),
    # the last three take the three heights of a tile
    [(1, 128, 64), (5, 72, 40), (17, 300, 33), (64, 520, 9), (3, 8, 4100), (1, 136, 16400)],
)
def test_the_kernel_multiplies_exactly_and_rounds_once(
    device: torch.device, num_tokens: int, num_in: int, num_out: int
) -> None:
    x, weight = inputs(num_tokens, num_in, num_out, device, torch.bfloat16)
    wanted = x.double() @ weight.double().t()
    got = multiplied(x, weight)
    assert got.dtype == torch.float32
    # fp32 sums of exact products, which tensor cores truncate: far below a rounding of bf16
    assert (got - wanted).abs().max() < (5e-5 if got.is_cuda else 5e-6)
    assert torch.equal(multiplied(x, weight, torch.bfloat16), got.bfloat16())


@pytest.mark.parametrize("num_outs", [(40, 9), (33, 64, 5)])
def test_several_weights_are_one_launch_and_the_same_values(
    device: torch.device, num_outs: tuple[int, ...]
) -> None:
    from m1serve.kernels.linear_triton import multiply

    weights = [inputs(1, 72, num_out, device, torch.bfloat16)[1] for num_out in num_outs]
    x = inputs(5, 72, 1, device, torch.bfloat16)[0]
    got = multiply(x, weights, torch.float32)
    for one, weight in zip(got, weights, strict=True):
        assert torch.equal(one, multiplied(x, weight))


def test_a_token_does_not_see_its_neighbours(device: torch.device) -> None:
    x, weight = inputs(40, 136, 50, device, torch.bfloat16)
    wanted = multiplied(x, weight)
    x[3] = torch.nan
    got = multiplied(x, weight)
    assert got[3].isnan().all()
    assert torch.equal(got[4:], wanted[4:])


def test_leading_dims_stay(device: torch.device) -> None:
    x, weight = inputs(6, 32, 5, device, torch.bfloat16)
    assert torch.equal(multiplied(x.view(2, 3, 32), weight), multiplied(x, weight).view(2, 3, 5))


def test_a_cpu_keeps_the_torch_operations_and_their_gradients() -> None:
    x, weight = inputs(6, 32, 5, torch.device("cpu"), torch.bfloat16)
    x.requires_grad_()
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    both = linears(x, [weight, weight[:3]])
    assert torch.equal(both[1], F.linear(x, weight[:3]))
    logits = fp32_logits(x, weight)
    assert torch.equal(logits, F.linear(x.float(), weight.float()))
    assert torch.autograd.grad(logits.sum(), x)[0].isfinite().all()
    assert fp32_logits(x[:0], weight).shape == (0, 5)


def test_bad_input_is_refused() -> None:
    x, weight = torch.zeros(4, 8), torch.zeros(5, 8)
    for given, said in (
        ((x[:, 1:], weight), "hidden has shape [4, 7] and weight [5, 8], wanted [..., hidden]"),
        ((x, weight[0]), "hidden has shape [4, 8] and weight [8], wanted [..., hidden]"),
        ((x, weight.to("meta")), "weight is on meta, wanted cpu"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            fp32_logits(*given)


@pytest.mark.parametrize(
    "num_tokens", [pytest.param(n, marks=GPU) for n in (1, 16, MAX_TOKENS, MAX_TOKENS + 1, 300)]
)
@pytest.mark.parametrize(("num_in", "num_out"), [(6144, 24576), (8192, 6144), (6144, 1024)])
def test_a_gpu_gives_fp32_sums_and_repeats_them(num_tokens: int, num_in: int, num_out: int) -> None:
    x, weight = inputs(num_tokens, num_in, num_out, torch.device("cuda"), torch.bfloat16)
    wanted = x.double() @ weight.double().t()
    with torch.no_grad():
        logits = fp32_logits(x, weight)
        assert torch.equal(fp32_logits(x, weight), logits)
        projected = linear(x, weight)
    assert logits.dtype == torch.float32
    assert (logits - wanted).abs().max() < 3e-4
    assert (projected - wanted).abs().max() < 4e-2
    with_gradients = fp32_logits(x.requires_grad_(), weight)
    assert (with_gradients.detach() - wanted).abs().max() < 3e-4


@pytest.mark.parametrize("num_out", [pytest.param(n, marks=GPU) for n in (24576, 6144, 1024)])
def test_on_a_gpu_a_token_has_the_same_bits_in_a_batch_of_any_size(num_out: int) -> None:
    x, weight = inputs(MAX_TOKENS, 6144, num_out, torch.device("cuda"), torch.bfloat16)
    alone = multiplied(x[7:8], weight)
    for n in (8, 16, 17, 32, 33, MAX_TOKENS):
        assert torch.equal(multiplied(x[:n], weight)[7:8], alone), n
