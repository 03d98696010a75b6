from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from m1serve.kernels.decay import slopes
from m1serve.kernels.lightning import lightning_rows, lightning_rows_step, row_slots
from m1serve.kernels.reference import lightning_chunked, lightning_recurrent

Kernel = Callable[..., tuple[Tensor, Tensor]]
B, H, D = 3, 4, 8
SLOPE = slopes(H, 8, 2)


def inputs(num_tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shape = (3, B, num_tokens, H, D)
    q, k, v = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return q, k, v


def some_state() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(B, H, D, D, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 500])
@pytest.mark.parametrize("chunk", [16, 64])
def test_chunks_equal_the_recurrence(num_tokens: int, chunk: int) -> None:
    q, k, v = inputs(num_tokens)
    wanted, wanted_state = lightning_recurrent(q, k, v, SLOPE, some_state())
    got, got_state = lightning_chunked(q, k, v, SLOPE, some_state(), chunk=chunk)
    assert torch.allclose(got, wanted, rtol=1e-11, atol=1e-11)
    assert torch.allclose(got_state, wanted_state, rtol=1e-11, atol=1e-11)


def test_any_split_carries_the_state() -> None:
    q, k, v = inputs(170)
    wanted, wanted_state = lightning_chunked(q, k, v, SLOPE)
    state, parts = None, []
    for start, end in [(0, 1), (1, 70), (70, 71), (71, 170)]:
        span = slice(start, end)
        o, state = lightning_chunked(q[:, span], k[:, span], v[:, span], SLOPE, state)
        parts.append(o)
    assert state is not None
    assert torch.allclose(torch.cat(parts, 1), wanted, rtol=1e-11, atol=1e-11)
    assert torch.allclose(state, wanted_state, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kernel", [lightning_chunked, lightning_recurrent])
def test_padding_leaves_no_trace_in_the_state(kernel: Kernel) -> None:
    q, k, v = inputs(90)
    o, state = kernel(q, k, v, SLOPE, some_state(), torch.tensor([0, 37, 90]))
    assert torch.equal(state[0], some_state()[0])
    for row, count in [(1, 37), (2, 90)]:
        real = (slice(row, row + 1), slice(count))
        wanted, wanted_state = lightning_recurrent(
            q[real], k[real], v[real], SLOPE, some_state()[row, None]
        )
        assert torch.allclose(o[real], wanted, rtol=1e-11, atol=1e-11)
        assert torch.allclose(state[row], wanted_state[0], rtol=1e-11, atol=1e-11)


def test_chunks_and_recurrence_have_the_same_gradients() -> None:
    grads = []
    for kernel in (lightning_chunked, lightning_recurrent):
        leaves = [t.requires_grad_() for t in (*inputs(100), some_state())]
        o, state = kernel(*leaves[:3], SLOPE, leaves[3])
        grads.append(torch.autograd.grad(o.sin().sum() + state.cos().sum(), leaves))
    for got, wanted in zip(*grads, strict=True):
        assert torch.allclose(got, wanted, rtol=1e-9, atol=1e-9)


def test_the_head_that_forgets_fastest_is_exact_in_fp32() -> None:
    """Totals hide an error in one head: compare each head by itself."""
    slope = slopes(64, 80, 0)[[0, 31, 62, 63]]
    q, k, v = inputs(300)
    wanted, _ = lightning_recurrent(q, k, v, slope, some_state())
    got, state = lightning_rows(q.float(), k.float(), v.float(), slope, some_state().float())
    assert got.dtype == state.dtype == torch.float32
    squares = [(t**2).sum((0, 1, 3)) for t in (got - wanted, wanted)]
    assert (squares[0] / squares[1]).sqrt().max() < 1e-5


def test_bf16_inputs_keep_an_fp32_state() -> None:
    q, k, v = inputs(20, torch.bfloat16)
    o, state = lightning_rows(q, k, v, SLOPE)
    assert o.dtype == state.dtype == torch.float32


def test_decode_updates_the_callers_state_and_spares_rows_without_a_token() -> None:
    q, k, v = (t.float() for t in inputs(1))
    state = some_state().float()
    wanted, wanted_state = lightning_recurrent(q, k, v, SLOPE, state)
    before = state.clone()
    slot_B = row_slots(3, torch.tensor([1, 0, 1]), state.device)
    got = lightning_rows_step(q[:, 0], k[:, 0], v[:, 0], SLOPE, state, slot_B)
    assert torch.allclose(got[[0, 2]], wanted[[0, 2], 0], rtol=1e-5, atol=1e-5)
    assert torch.allclose(state[[0, 2]], wanted_state[[0, 2]], rtol=1e-5, atol=1e-6)
    assert torch.equal(state[1], before[1])
