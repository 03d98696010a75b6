"""The router of few tokens against torch's softmax and top-k.

Shapes: N tokens, E hidden, X experts, P chosen experts.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from m1serve.kernels.moe import Routes, many_logits, route

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def chosen_by_kernel(x_NE: Tensor, gate_XE: Tensor, num_chosen: int) -> Routes:
    from m1serve.kernels.router_triton import choose, few_logits

    return Routes(*choose(few_logits(x_NE, gate_XE), num_chosen))


def inputs(
    num_tokens: int, hidden: int, num_experts: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
    gate = torch.randn(num_experts, hidden, generator=generator) / hidden**0.5
    return x.to(device), gate.to(device)


@pytest.mark.parametrize(
    ("num_tokens", "hidden", "num_experts", "num_chosen"),
    [
        (1, 6144, 32, 2),
        (1, 7, 1, 1),
        (5, 96, 32, 2),
        (9, 100, 5, 3),
        (35, 64, 33, 2),
        (3, 8200, 6, 6),
    ],
)
def test_it_chooses_as_torch_does(
    device: torch.device, num_tokens: int, hidden: int, num_experts: int, num_chosen: int
) -> None:
    x, gate = inputs(num_tokens, hidden, num_experts, device)
    weight, chosen, p = chosen_by_kernel(x, gate, num_chosen)
    exact = torch.softmax(x.double() @ gate.double().t(), -1)
    wanted_p, wanted = exact.topk(num_chosen, -1)
    assert torch.equal(chosen, wanted)
    assert chosen.dtype == torch.int64
    assert (p - exact).abs().max() < 2e-6
    assert (weight - wanted_p / wanted_p.sum(-1, keepdim=True)).abs().max() < 2e-6


def test_of_equals_the_lower_expert_comes_first(device: torch.device) -> None:
    x, gate = inputs(3, 64, 8, device)
    gate[:] = gate[0]
    weight, chosen, _ = chosen_by_kernel(x, gate, 2)
    assert chosen.tolist() == [[0, 1]] * 3
    assert (weight - 0.5).abs().max() < 1e-6
    x = torch.ones(1, 64, device=device)
    gate = torch.zeros(8, 64, device=device)
    gate[3] = gate[6] = 1 / 64
    gate[1] = 2 / 64
    assert chosen_by_kernel(x, gate, 3).chosen_NP.tolist() == [[1, 3, 6]]


def test_what_is_not_finite_still_names_different_experts(device: torch.device) -> None:
    x, gate = inputs(3, 64, 8, device)
    alone = chosen_by_kernel(x[1:2], gate, 2)
    x[0] = torch.nan
    weight, chosen, _ = chosen_by_kernel(x, gate, 2)
    assert chosen[0].tolist() == [0, 1]
    assert weight[0].isnan().all()
    assert torch.equal(chosen[1:2], alone.chosen_NP)
    assert torch.equal(weight[1:2], alone.weight_NP)


def test_a_token_has_the_same_bits_in_a_batch_of_any_size(device: torch.device) -> None:
    x, gate = inputs(13, 96, 32, device)
    together = chosen_by_kernel(x, gate, 2)
    for token in (0, 7, 12):
        alone = chosen_by_kernel(x[token : token + 1], gate, 2)
        for one, all_ in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_[token])


def test_no_tokens_have_no_routes(device: torch.device) -> None:
    x, gate = inputs(0, 96, 32, device)
    assert [len(t) for t in chosen_by_kernel(x, gate, 2)] == [0, 0, 0]


@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", [pytest.param("cuda", marks=GPU), "cpu"])
def test_many_tokens_meet_an_fp32_gate_in_three_exact_pieces(
    where: str, gate_dtype: torch.dtype
) -> None:
    x, gate = inputs(300, 512, 32, torch.device(where))
    gate = (gate * 1.2345).to(gate_dtype)
    exact = x.double() @ gate.double().t()
    with torch.no_grad():
        got = many_logits(x, gate)
    assert got.dtype == torch.float32
    assert (got - exact).abs().max() < (5e-5 if got.is_cuda else 4e-6)


@pytest.mark.parametrize("num_tokens", [pytest.param(n, marks=GPU) for n in (256, 1000)])
def test_a_gpu_routes_alike_with_and_without_gradients(num_tokens: int) -> None:
    x, gate = inputs(num_tokens, 6144, 32, torch.device("cuda"))
    with torch.no_grad():
        got = route(x, gate, 2)
    wanted = route(x, gate, 2)
    # where two experts are nearly as probable, fp32 sums in another order may turn them round
    assert (got.chosen_NP == wanted.chosen_NP).float().mean() > 0.99
    assert (got.p_NX - wanted.p_NX).abs().max() < 3e-5
