"""Experts against a float64 loop over tokens, whichever way they run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from m1serve.kernels.moe import dense, grouped_experts, looped, route
from m1serve.kernels.moe_sorted import Grouped, looped_picks

N, E, FF, X, P = 23, 16, 24, 5, 2

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def grouped(x: Tensor, w13: Tensor, w2: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    out: Tensor = Grouped.apply(x, w13, w2, weight, chosen)
    return out


WAYS = pytest.mark.parametrize("run", [grouped, dense, looped, grouped_experts])


def inputs(
    num_tokens: int = N, num_chosen: int = P, dtype: torch.dtype = torch.float32, scale: int = 1
) -> Inputs:
    """Expert 1 is never chosen; the choice of a token's experts is in no order."""
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5

    num_in, num_inner = E * scale, FF * scale
    draws = torch.rand(num_tokens, X, generator=generator, dtype=torch.float64)
    draws[:, 1] = 0
    chosen = draws.topk(num_chosen, -1).indices.flip(-1)
    weight = torch.rand(num_tokens, num_chosen, generator=generator, dtype=torch.float64)
    x = normal(num_tokens, num_in) * num_in**0.5
    w13, w2 = normal(X, 2 * num_inner, num_in), normal(X, num_in, num_inner)
    return x.to(dtype), w13.to(dtype), w2.to(dtype), weight.to(dtype), chosen


def by_hand(x: Tensor, w13: Tensor, w2: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Token by token in float64."""
    x, w13, w2, weight = x.double(), w13.double(), w2.double(), weight.double()
    rows = []
    for token in range(x.shape[0]):
        row = torch.zeros_like(x[token])
        for pick, expert in enumerate(chosen[token].tolist()):
            a, b = (w13[expert] @ x[token]).chunk(2)
            row = row + weight[token, pick] * (w2[expert] @ (a * torch.sigmoid(a) * b))
        rows.append(row)
    return torch.stack(rows) if rows else torch.zeros_like(x)


def out_and_grads(run: Experts, given: Inputs) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in given[:4]]
    out = run(leaves[0], leaves[1], leaves[2], leaves[3], given[4])
    return [out, *torch.autograd.grad(out.double().sin().sum(), leaves)]


def worst(got: Tensor, wanted: Tensor) -> float:
    return ((got.double() - wanted).abs().max() / wanted.abs().max()).item()


@WAYS
@pytest.mark.parametrize(("num_tokens", "num_chosen"), [(1, 2), (N, 1), (N, 2), (64, 3)])
def test_every_way_equals_a_loop_over_tokens(
    run: Experts, num_tokens: int, num_chosen: int
) -> None:
    given = inputs(num_tokens, num_chosen)
    for got, wanted in zip(out_and_grads(run, given), out_and_grads(by_hand, given), strict=True):
        assert worst(got, wanted) < 2e-6


@WAYS
def test_all_tokens_may_choose_one_expert(run: Experts) -> None:
    x, w13, w2, weight, _ = inputs(num_chosen=1)
    given = (x, w13, w2, weight, torch.full((N, 1), 3))
    for got, wanted in zip(out_and_grads(run, given), out_and_grads(by_hand, given), strict=True):
        assert worst(got, wanted) < 2e-6


@WAYS
def test_an_expert_nobody_chose_gets_no_gradient(run: Experts) -> None:
    _, _, dw13, dw2, _ = out_and_grads(run, inputs())
    for grad in (dw13, dw2):
        assert grad[1].abs().max() == 0
        assert grad[[0, 2, 3, 4]].flatten(1).abs().amax(1).min() > 0


@pytest.mark.parametrize("run", [dense, looped, grouped_experts])
def test_gradients_pass_gradcheck(run: Experts) -> None:
    x, w13, w2, weight, chosen = inputs(5, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (x, w13, w2, weight)]
    assert torch.autograd.gradcheck(lambda *given: run(*given, chosen), leaves)


@pytest.mark.parametrize("frozen", [0, 1, 2, 3])
def test_a_frozen_input_leaves_the_other_gradients_as_they_are(frozen: int) -> None:
    given = inputs()
    wanted = out_and_grads(grouped, given)[1:]
    leaves = [tensor.detach().requires_grad_(i != frozen) for i, tensor in enumerate(given[:4])]
    grouped(leaves[0], leaves[1], leaves[2], leaves[3], given[4]).double().sin().sum().backward()
    for i, leaf in enumerate(leaves):
        if i == frozen:
            assert leaf.grad is None
        else:
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, wanted[i])


def test_bf16_stays_within_its_rounding() -> None:
    given = inputs(dtype=torch.bfloat16)
    for got, wanted in zip(
        out_and_grads(grouped, given), out_and_grads(by_hand, given), strict=True
    ):
        assert worst(got, wanted) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_chosen", [1, 2])
def test_a_product_an_expert_gives_the_terms_of_the_grouped_one(
    dtype: torch.dtype, num_chosen: int
) -> None:
    given = inputs(64, num_chosen, dtype=dtype)
    got = looped_picks(*given)
    assert got.y_ME.shape == (64 * num_chosen, E)
    assert worst(got.total(), by_hand(*given)) < (2e-2 if dtype == torch.bfloat16 else 2e-6)
    crowded = (*given[:4], torch.full_like(given[4], 3))
    assert worst(looped_picks(*crowded).total(), by_hand(*crowded)) < 2e-2


def test_no_tokens_give_no_rows_and_carry_gradients() -> None:
    x, w13, w2, weight, chosen = inputs(0)
    out = grouped_experts(x.requires_grad_(), w13, w2, weight, chosen)
    assert out.shape == (0, E)
    out.sum().backward()
    assert x.grad is not None


def test_a_neighbour_may_be_anything_but_leaves_no_trace() -> None:
    x, w13, w2, weight, chosen = inputs()
    alone = grouped_experts(x, w13, w2, weight, chosen)
    x[5] = torch.nan
    beside = grouped_experts(x, w13, w2, weight, chosen)
    others = [token for token in range(N) if token != 5]
    assert torch.equal(beside[others], alone[others])
    assert beside[5].isnan().all()


def test_the_router_is_fp32_and_renormalises_the_top() -> None:
    x, gate = inputs(dtype=torch.bfloat16)[0], torch.randn(X, E).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        weight, chosen, p = route(x, gate, P)
    wanted = torch.softmax(x.double() @ gate.double().t(), -1)
    assert p.dtype == weight.dtype == torch.float32
    assert (p - wanted).abs().max() < 1e-6
    assert torch.equal(chosen, wanted.topk(P, -1).indices)
    assert (weight.sum(-1) - 1).abs().max() < 1e-6
    assert (weight[:, 0] >= weight[:, 1]).all()


def test_autocast_may_mix_dtypes() -> None:
    x, w13, w2, weight, chosen = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = grouped_experts(x.bfloat16(), w13, w2, weight, chosen)
    assert worst(out, by_hand(x, w13, w2, weight, chosen)) < 2e-2


def test_a_bad_input_is_named() -> None:
    x, w13, w2, weight, chosen = inputs()
    bad: list[tuple[Inputs, str]] = [
        ((x[0], w13, w2, weight, chosen), "x has shape"),
        ((x, w13[:, 1:], w2, weight, chosen), "w13 has shape"),
        ((x[:, 1:], w13, w2, weight, chosen), "w2 has shape"),
        ((x, w13, w2, weight[:, :1], chosen), "weight has shape"),
        ((x, w13, w2, weight, chosen[1:]), "chosen has shape"),
        ((x, w13, w2, weight[:, :0], chosen[:, :0]), "names 0 experts a token, wanted 1 to 5"),
        ((x, w13, w2, weight, chosen.int()), "chosen is torch.int32, wanted torch.int64"),
        ((x, w13, w2, chosen, chosen), "weight is torch.int64, wanted a floating"),
        ((x.half(), w13, w2, weight, chosen), "x is torch.float16, wanted"),
        ((x, w13, w2.double(), weight, chosen), "x is torch.float32, wanted"),
        ((x, w13, w2.to("meta"), weight, chosen), "w2 is on meta, wanted cpu"),
        ((x, w13, w2, weight, chosen + 3), "wanted experts from 0 to 4"),
        ((x, w13, w2, weight, chosen - 1), "chosen holds -1 to"),
    ]
    for given, message in bad:
        with pytest.raises(ValueError, match=message):
            grouped_experts(*given)
    with pytest.raises(ValueError, match="num_chosen is 6, wanted 1 to 5"):
        route(x, torch.randn(X, E), 6)


def on_gpu(given: Inputs) -> Inputs:
    x, w13, w2, weight, chosen = given
    return x.cuda(), w13.cuda(), w2.cuda(), weight.float().cuda(), chosen.cuda()


@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=GPU) for d in (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_a_gpu_equals_a_loop_over_tokens(dtype: torch.dtype, num_tokens: int) -> None:
    given = inputs(num_tokens, dtype=dtype, scale=16)
    wanted = out_and_grads(by_hand, given)
    # memory the allocator hands out again must not be mistaken for zeros
    poison = torch.full((1 << 24,), torch.nan, device="cuda")
    del poison
    first = out_and_grads(grouped_experts, on_gpu(given))
    again = out_and_grads(grouped_experts, on_gpu(given))
    for got, same, right in zip(first, again, wanted, strict=True):
        assert torch.equal(got, same)
        assert worst(got.cpu(), right) < (2e-2 if dtype == torch.bfloat16 else 1e-4)
    assert first[2][1].abs().max() == 0
    assert first[3][1].abs().max() == 0


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=GPU)])
def test_a_cuda_graph_replays_other_choices(dtype: torch.dtype) -> None:
    held = on_gpu(inputs(33, dtype=dtype, scale=16))
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            grouped_experts(*held)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = grouped_experts(*held)
        held[4].copy_((held[4] + 1) % X)
        graph.replay()
        assert torch.equal(out, grouped_experts(*held))
