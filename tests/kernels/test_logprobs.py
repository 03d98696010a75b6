from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from m1serve.kernels import logprobs as logprobs_module
from m1serve.kernels.logprobs import LOWEST, chunk_width, linear_logprobs

HAS_GPU = torch.cuda.is_available()
NEEDS_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU"),
)
on_both = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])

# T, E, V, chunk
SIZES = [
    (1, 8, 130, 64),
    (3, 16, 1, None),
    (5, 24, 63, 1),
    (7, 32, 500, None),
    (33, 48, 501, 128),
    (64, 40, 2049, 2048),
    (0, 8, 50, 16),
]


def operands(
    T: int, E: int, V: int, dtype: torch.dtype, where: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(T + V)
    hidden = torch.randn(T, E, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, E, generator=generator, dtype=torch.float64) * 2 / E**0.5
    target = torch.randint(0, V, (T,), generator=generator)
    hidden, weight = (t.to(where, dtype).requires_grad_() for t in (hidden, weight))
    return hidden, weight, target.to(where)


def per_token(T: int, where: str | torch.device = "cpu") -> tuple[Tensor, Tensor]:
    """What arrives as gradients of the logprobs and of the entropies."""
    generator = torch.Generator().manual_seed(T)
    first, second = torch.randn(2, T, generator=generator, dtype=torch.float64).to(where)
    return first, second


def naive(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(hidden @ weight.t(), -1)
    return logp.gather(1, target.long()[:, None]).squeeze(1), -(logp.exp() * logp).sum(1)


def gradients(results: tuple[Tensor, Tensor], hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    logprob, entropy = results
    by_logprob, by_entropy = per_token(len(logprob), logprob.device)
    loss = (logprob * by_logprob).sum() + (entropy * by_entropy).sum()
    return torch.autograd.grad(loss, (hidden, weight))


def gap(got: Tensor, wanted: Tensor) -> float:
    """Largest error of an entry over the largest entry."""
    got, wanted = got.detach().double(), wanted.detach().double()
    if got.numel() == 0:
        return 0.0
    return ((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)).item()


@on_both
@pytest.mark.parametrize(("T", "E", "V", "chunk"), SIZES)
@pytest.mark.parametrize(
    ("dtype", "forward_gap", "backward_gap"),
    [
        (torch.float64, 1e-13, 1e-12),
        (torch.float32, 2e-6, 1e-5),
        (torch.bfloat16, 2e-6, 8e-3),
        (torch.float16, 2e-6, 1e-3),
    ],
)
def test_both_directions_are_those_of_float64_log_softmax(
    T: int,
    E: int,
    V: int,
    chunk: int | None,
    dtype: torch.dtype,
    forward_gap: float,
    backward_gap: float,
    where: str,
) -> None:
    hidden, weight, target = operands(T, E, V, dtype, where)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    wanted = naive(*exact, target)
    got = linear_logprobs(hidden, weight, target, chunk=chunk)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert a.shape == (T,)
        if V > 1:
            assert gap(a, b) < forward_gap
        else:
            assert not a.any()
    if V > 1:
        for a, b in zip(gradients(got, hidden, weight), gradients(wanted, *exact), strict=True):
            assert a.dtype == dtype
            assert gap(a, b) < backward_gap


def test_gradients_are_those_of_finite_differences() -> None:
    hidden, weight, target = operands(4, 5, 11, torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: tuple(linear_logprobs(h, w, target, chunk=4)), (hidden, weight)
    )


def test_fp32_is_log_softmax_of_the_logits() -> None:
    hidden, weight, target = operands(50, 64, 1280, torch.float32)
    wanted, _ = naive(hidden, weight, target)
    got = linear_logprobs(hidden, weight, target).logprob_T
    assert torch.allclose(got, wanted, rtol=1e-7, atol=1e-6)


@on_both
@pytest.mark.parametrize("which", ["logprob_T", "entropy_T"])
@pytest.mark.parametrize("wants", ["hidden", "weight"])
def test_one_result_and_one_operand_can_be_asked_for(which: str, wants: str, where: str) -> None:
    hidden, weight, target = operands(6, 8, 40, torch.float64, where)
    leaf, other = (hidden, weight) if wants == "hidden" else (weight, hidden)
    other.requires_grad_(False)
    got = getattr(linear_logprobs(hidden, weight, target, chunk=16), which)
    index = 0 if which == "logprob_T" else 1
    (wanted,) = torch.autograd.grad(naive(hidden, weight, target)[index].sum(), leaf)
    (grad,) = torch.autograd.grad(got.sum(), leaf)
    assert gap(grad, wanted) < 1e-12


@on_both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_operands_and_int32_targets_are_taken(dtype: torch.dtype, where: str) -> None:
    hidden, weight, target = operands(9, 16, 70, dtype, where)
    wanted = linear_logprobs(hidden, weight, target, chunk=32)
    wide = torch.stack([hidden, hidden], 1).detach()[:, 1].requires_grad_()
    turned = weight.detach().t().contiguous().t().requires_grad_()
    got = linear_logprobs(wide, turned, target.int(), chunk=32)
    for a, b in zip(got, wanted, strict=True):
        assert gap(a, b) < 2e-6
    for a, b in zip(gradients(got, wide, turned), gradients(wanted, hidden, weight), strict=True):
        assert gap(a, b) < 8e-3


@on_both
@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_huge_logits_stay_finite(scale: float, where: str) -> None:
    hidden, weight, target = operands(8, 16, 100, torch.float32, where)
    got = linear_logprobs(hidden * scale, weight, target, chunk=32)
    assert all(t.isfinite().all() for t in got)
    assert all(t.isfinite().all() for t in gradients(got, hidden, weight))
    assert (got.entropy_T >= 0).all()


@on_both
def test_a_nan_weight_is_not_hidden(where: str) -> None:
    hidden, weight, target = operands(4, 8, 100, torch.float32, where)
    with torch.no_grad():
        weight[70] = torch.nan
        assert linear_logprobs(hidden, weight, target, chunk=32).logprob_T.isnan().all()


@on_both
def test_the_same_call_gives_the_same_bits(where: str) -> None:
    runs = []
    for _ in range(2):
        hidden, weight, target = operands(40, 32, 3000, torch.bfloat16, where)
        results = linear_logprobs(hidden, weight, target, chunk=1024)
        runs.append((*results, *gradients(results, hidden, weight)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_no_gradient_of_the_gradient_is_given() -> None:
    hidden, weight, target = operands(3, 4, 10, torch.float64)
    loss = linear_logprobs(hidden, weight, target).logprob_T.square().sum()
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden": torch.zeros(3)}, "hidden has shape [3], wanted [tokens, hidden]"),
        ({"weight": torch.zeros(3)}, "weight has shape [3], wanted [vocabulary, hidden]"),
        ({"hidden": torch.zeros(3, 4).long()}, "hidden is torch.int64, wanted one of"),
        ({"weight": torch.zeros(9, 4).half()}, "weight is torch.float16, wanted torch.float32"),
        ({"weight": torch.zeros(9, 5)}, "weight has shape [9, 5], wanted [vocabulary, 4]"),
        ({"weight": torch.zeros(0, 4)}, "a vocabulary that is not empty"),
        ({"weight": torch.zeros(9, 4, device="meta")}, "weight is on meta, wanted cpu"),
        ({"target": torch.zeros(3)}, "target is torch.float32, wanted torch.int32 or torch.int64"),
        ({"target": torch.zeros(3, 1).long()}, "target has shape [3, 1], wanted one dim"),
        ({"target": torch.zeros(2).long()}, "target has 2 tokens, wanted 3 as hidden"),
        ({"target": torch.tensor([0, 9, 1])}, "target has ids from 0 to 9, wanted all in [0, 9)"),
        ({"target": torch.tensor([0, -1, 1])}, "target has ids from -1 to 1, wanted all in"),
        ({"chunk": 0}, "chunk is 0, wanted at least 1"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], said: str) -> None:
    given = {
        "hidden": torch.zeros(3, 4),
        "weight": torch.zeros(9, 4),
        "target": torch.zeros(3).long(),
        "chunk": None,
    } | change
    with pytest.raises(ValueError, match=re.escape(said)):
        linear_logprobs(given["hidden"], given["weight"], given["target"], chunk=given["chunk"])


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_on_a_gpu_a_target_outside_the_vocabulary_is_nan(dtype: torch.dtype) -> None:
    hidden, weight, target = operands(4, 8, 100, dtype, "cuda")
    target[1:3] = torch.tensor([-1, 100])
    logprob = linear_logprobs(hidden, weight, target, chunk=32).logprob_T
    assert logprob.isnan().tolist() == [False, True, True, False]


@pytest.mark.parametrize("num_tokens", [0, 1, 500, 8192, 80_000])
@pytest.mark.parametrize("vocab_size", [1, 129, 1280, 200_064])
def test_chunks_are_near_equal_and_fit(num_tokens: int, vocab_size: int) -> None:
    width = chunk_width(num_tokens, vocab_size, 6)
    num_chunks = -(-vocab_size // width)
    assert width % 128 == 0
    assert width * num_chunks - vocab_size < 128 * num_chunks
    held_bytes = 6 * num_tokens * (width - 128)
    assert held_bytes <= logprobs_module.WORKSPACE_BYTES or width <= logprobs_module.MIN_CHUNK + 127
    if vocab_size == 200_064 and num_tokens == 8192:
        assert num_chunks <= 20


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
def test_memory_does_not_grow_with_the_vocabulary() -> None:
    T, E, V, C = 2048, 256, 100_000, 4096
    hidden, weight, target = operands(T, E, V, torch.bfloat16, "cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients(linear_logprobs(hidden, weight, target, chunk=C), hidden, weight)
    extra = torch.cuda.max_memory_allocated() - before - weight.nbytes
    # 6 bytes of a logit and its gradient, 4 + 2 of hidden's gradient, cuBLAS's own workspace
    assert extra < 6 * T * (C + E) + (100 << 20)
    assert extra < 2 * T * V


@pytest.mark.parametrize("widths", [(1,), (63, 1, 64), (300, 77), (2048, 2049, 5)])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_fused_kernels_do_what_torch_does(
    device: torch.device, widths: tuple[int, ...], out_dtype: torch.dtype
) -> None:
    from m1serve.kernels import logprobs_triton as fused

    T, V = 3, sum(widths)
    plain = logprobs_module._TorchElementwise()
    generator = torch.Generator().manual_seed(V)
    # rows lie further apart than they are long
    logits = (torch.randn(T, V + 7, generator=generator) * 8).to(device)
    target = torch.randint(0, V, (T,), generator=generator, dtype=torch.int32).to(device)
    start = torch.tensor([LOWEST, 0.0, 0.0, torch.nan], device=device)[:, None].repeat(1, T)
    got, wanted = start.clone(), start.double()
    spans = [(sum(widths[:i]), sum(widths[: i + 1])) for i in range(len(widths))]
    for at, end in spans:
        fused.fold_chunk(logits[:, at:end], got, target, at)
        plain.fold_chunk(logits[:, at:end].double(), wanted, target, at)
        assert torch.allclose(got.double(), wanted, rtol=1e-6, atol=1e-6, equal_nan=True)

    highest, total, weighted, _ = wanted
    entropy = total.log() - weighted / total
    rows = torch.stack([highest, total.log(), entropy, *per_token(T, device)])
    for at, end in spans:
        out = torch.full((T, end - at + 3), torch.nan, dtype=out_dtype, device=device)
        exact = torch.empty(T, end - at, dtype=torch.float64, device=device)
        fused.differentiate_chunk(logits[:, at:end], rows.float(), target, at, out[:, : end - at])
        plain.differentiate_chunk(logits[:, at:end].double(), rows, target, at, exact)
        rounding = 1e-6 if out_dtype == torch.float32 else 2**-8
        assert torch.allclose(out[:, : end - at].double(), exact, rtol=rounding, atol=1e-6)
        assert out[:, end - at :].isnan().all()


def test_the_fused_gradient_may_replace_the_logits(device: torch.device) -> None:
    from m1serve.kernels import logprobs_triton as fused

    logits = torch.randn(2, 70, generator=torch.Generator().manual_seed(0)).to(device)
    target = torch.tensor([3, 60], device=device)
    rows = torch.tensor([[3.0], [1.5], [2.0], [0.7], [-0.4]], device=device).repeat(1, 2)
    apart = torch.empty_like(logits)
    fused.differentiate_chunk(logits, rows, target, 0, apart)
    fused.differentiate_chunk(logits, rows, target, 0, logits)
    assert torch.equal(logits, apart)
