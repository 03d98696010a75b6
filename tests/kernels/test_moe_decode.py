"""The experts of few tokens, against the grouped path to the bit of its roundings, and float64.

Shapes: N tokens, E hidden, F ff of one expert, X experts, P experts per token.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from m1serve.kernels.moe import MIN_LOOPED_PICKS, experts, grouped_experts, route, routed_experts
from m1serve.kernels.moe_sorted import Grouped
from m1serve.kernels.residual import Picks

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
E, FF, X = 136, 40, 5


def inputs(
    num_tokens: int,
    num_chosen: int = 2,
    *,
    sizes: tuple[int, int, int] = (E, FF, X),
    dtype: torch.dtype = torch.bfloat16,
) -> Inputs:
    """Expert 1 is never chosen."""
    hidden, ff, num_experts = sizes
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    draws = torch.rand(num_tokens, num_experts, generator=generator)
    draws[:, 1] = 0
    return (
        normal(num_tokens, hidden).to(dtype),
        (normal(num_experts, 2 * ff, hidden) / hidden**0.5).to(dtype),
        (normal(num_experts, hidden, ff) / ff**0.5).to(dtype),
        torch.rand(num_tokens, num_chosen, generator=generator),
        draws.topk(num_chosen, -1).indices.flip(-1),
    )


def decoded(given: Inputs) -> Tensor:
    from m1serve.kernels.moe_decode import expert_picks

    return Picks(expert_picks(*given), None, given[4].shape[1]).total()


def on(device: torch.device, given: Inputs) -> Inputs:
    x, w13, w2, weight, chosen = (t.to(device) for t in given)
    return x, w13, w2, weight, chosen


def in_float64(given: Inputs) -> Tensor:
    x, w13, w2, weight, chosen = (t.double() if t.is_floating_point() else t for t in given)
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for pick, expert in enumerate(chosen[token].tolist()):
            a, b = (w13[expert] @ x[token]).chunk(2)
            out[token] += weight[token, pick] * (w2[expert] @ (a * torch.sigmoid(a) * b))
    return out


def worst(got: Tensor, wanted: Tensor) -> float:
    return ((got.double().cpu() - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize(
    ("num_tokens", "num_chosen", "sizes"),
    [
        (1, 1, (E, FF, X)),
        (1, 2, (256, 64, 32)),
        # picks are slots: several name one expert, and only the first of them works
        (7, 2, (E, FF, 32)),
        (2, 2, (E, FF, X)),
        # experts are slots, and rows and depths do not divide the tiles
        (9, 3, (E, FF, X)),
        (60, 2, (72, 40, X)),
        (70, 2, (64, 40, X)),
        (256, 2, (64, 32, X)),
    ],
)
def test_few_tokens_equal_the_grouped_path(
    device: torch.device, num_tokens: int, num_chosen: int, sizes: tuple[int, int, int]
) -> None:
    given = inputs(num_tokens, num_chosen, sizes=sizes)
    got = decoded(on(device, given))
    assert worst(got, in_float64(given)) < 2e-2
    grouped: Tensor = Grouped.apply(*given)
    # both round at the same places: what is left is the order of fp32 sums
    assert worst(got, grouped.double()) < 8e-3
    assert (got.cpu() == grouped).float().mean() > 0.9


def test_fp32_in_the_interpreter_is_the_formula(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("on a GPU the kernel serves bf16 only")
    given = inputs(9, 2, dtype=torch.float32)
    assert worst(decoded(given), in_float64(given)) < 1e-6


@pytest.mark.parametrize("num_tokens", [1, 21, 50])
def test_one_expert_may_get_every_token(device: torch.device, num_tokens: int) -> None:
    x, w13, w2, weight, _ = inputs(num_tokens, 1, sizes=(64, 32, X))
    given = (x, w13, w2, weight, torch.full((num_tokens, 1), 4))
    assert worst(decoded(on(device, given)), in_float64(given)) < 2e-2


def test_weights_of_an_expert_nobody_chose_are_not_read(device: torch.device) -> None:
    given = inputs(9)
    wanted = decoded(on(device, given))
    given[1][1], given[2][1] = torch.nan, torch.nan
    assert torch.equal(decoded(on(device, given)), wanted)


def test_a_token_has_the_same_bits_beside_any_neighbours(device: torch.device) -> None:
    x, w13, w2, weight, chosen = on(device, inputs(12))
    alone = decoded((x[5:6], w13, w2, weight[5:6], chosen[5:6]))
    x[4], weight[6] = torch.nan, torch.nan
    beside = decoded((x, w13, w2, weight, chosen))
    assert torch.equal(beside[5:6], alone)
    assert beside[4].isnan().all()
    backwards = decoded((x.flip(0), w13, w2, weight.flip(0), chosen.flip(0)))
    assert torch.equal(backwards[6], alone[0])


def test_tiles_of_a_crowded_expert_leave_no_trace(device: torch.device) -> None:
    x, w13, w2, weight, _ = on(device, inputs(40, 1, sizes=(64, 32, X)))
    chosen = torch.full((40, 1), 2, device=device)
    crowded = decoded((x, w13, w2, weight, chosen))
    chosen[::2] = 3
    assert torch.equal(decoded((x, w13, w2, weight, chosen))[1::2], crowded[1::2])


@pytest.mark.parametrize(
    ("num_chosen", "sizes"), [(2, (256, 64, 32)), (1, (E, FF, X)), (3, (72, 40, X))]
)
def test_one_token_chooses_its_experts_itself(
    device: torch.device, num_chosen: int, sizes: tuple[int, int, int]
) -> None:
    from m1serve.kernels.moe_single import one_token_picks
    from m1serve.kernels.router_triton import choose

    x, w13, w2, _, _ = on(device, inputs(1, sizes=sizes))
    draws = torch.randn(1, sizes[2], generator=torch.Generator().manual_seed(2))
    for logits in (draws.to(device), torch.full_like(draws, torch.nan).to(device)):
        weight, chosen, _ = choose(logits, num_chosen)
        got = one_token_picks(x, w13, w2, logits, num_chosen)
        wanted = decoded((x, w13, w2, weight, chosen))
        assert torch.equal(Picks(got, None, num_chosen).total().isnan(), wanted.isnan())
        assert torch.equal(Picks(got, None, num_chosen).total().nan_to_num(), wanted.nan_to_num())


def test_an_expert_that_does_not_exist_is_not_read(device: torch.device) -> None:
    x, w13, w2, weight, chosen = on(device, inputs(3))
    wanted = decoded((x, w13, w2, weight, chosen))
    chosen[1] = torch.tensor([X, -1], device=device)
    got = decoded((x, w13, w2, weight, chosen))
    assert torch.equal(got[[0, 2]], wanted[[0, 2]])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("num_tokens", [1, 8, 33, 128, 256, 300])
def test_a_gpu_chooses_the_way_and_repeats_it_in_a_graph(num_tokens: int) -> None:
    given = on(torch.device("cuda"), inputs(num_tokens, sizes=(1024, 1536, 32)))
    wanted = in_float64(given).cpu()
    with torch.no_grad():
        assert isinstance(experts(*given), Picks)
        got = grouped_experts(*given)
        assert worst(got, wanted) < 1e-2
        assert torch.equal(grouped_experts(*given), got)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            grouped_experts(*given)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = grouped_experts(*given)
        given[4].copy_((given[4] + 1) % 32)
        graph.replay()
        assert torch.equal(out, grouped_experts(*given))
        gate = torch.randn(32, 1024, device="cuda")
        weight, chosen, _ = route(given[0], gate, 2)
        itself = routed_experts(given[0], gate, given[1], given[2], 2)
        assert isinstance(itself, Picks)
        told = grouped_experts(*given[:3], weight, chosen)
        assert torch.equal(itself.total(), told)
    with_gradients: Tensor = Grouped.apply(*given)
    assert worst(out, with_gradients.double().cpu()) < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_takes_a_product_an_expert_for_many_tokens() -> None:
    given = on(torch.device("cuda"), inputs(16 * MIN_LOOPED_PICKS, sizes=(64, 128, 32)))
    with torch.no_grad():
        got = grouped_experts(*given)
        assert torch.equal(grouped_experts(*given), got)
    wanted: Tensor = Grouped.apply(*given)
    assert worst(got, wanted.double().cpu()) < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_a_token_has_the_same_bits_in_a_batch_of_any_size() -> None:
    x, w13, w2, weight, chosen = on(torch.device("cuda"), inputs(256, sizes=(1024, 1536, 32)))
    alone = decoded((x[5:6], w13, w2, weight[5:6], chosen[5:6]))
    for n in (6, 48, 49, 128, 129, 256):
        assert torch.equal(decoded((x[:n], w13, w2, weight[:n], chosen[:n]))[5:6], alone), n
