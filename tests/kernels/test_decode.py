"""The Triton decode step against the recurrence in float64, head by head.

Shapes: B rows, H heads, D head dim, S slots, T steps.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from m1serve.kernels.checks import check_decode
from m1serve.kernels.decay import slopes
from m1serve.kernels.reference import lightning_chunked, lightning_recurrent, lightning_step_

S = 9
SLOTS = [4, -1, 0, 7, -3]
B = len(SLOTS)
LIVE = [row for row, slot in enumerate(SLOTS) if slot >= 0]
LIVE_SLOTS = [SLOTS[row] for row in LIVE]
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4, torch.float32: 1e-5}
DTYPES = list(TOLERANCE)


def decode(*inputs: Tensor, silu: bool = False, out_BHD: Tensor | None = None) -> Tensor:
    from m1serve.kernels.decode import decode as triton_decode

    check_decode(*inputs, out_BHD=out_BHD)
    return triton_decode(*inputs, silu=silu, out_BHD=out_BHD)


def packed_qkv(
    num_rows: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one packed projection, interleaved a head as the model's are."""
    generator = torch.Generator().manual_seed(head_dim)
    packed = torch.randn(num_rows, heads, 3 * head_dim, generator=generator)
    q, k, v = packed.to(device, dtype).split(head_dim, -1)
    return q, k, v


def some_pool(heads: int, head_dim: int, device: torch.device) -> Tensor:
    """A view with a gap between slots; slots that no row names are NaN."""
    generator = torch.Generator().manual_seed(1)
    pool = torch.randn(S, 2, heads, head_dim, head_dim, generator=generator)[:, 1]
    pool[[slot for slot in range(S) if slot not in LIVE_SLOTS]] = torch.nan
    return pool.to(device)


def layer_0_slopes(heads: int, device: torch.device) -> Tensor:
    return slopes(heads, 80, 0).to(device)


def worst_head(got: Tensor, wanted: Tensor, head_dim: int = 1) -> float:
    """The relative error of the head with the largest, over everything else."""
    errors, sizes = (
        t.double().movedim(head_dim, 0).flatten(1).norm(dim=1) for t in (got - wanted, wanted)
    )
    return float((errors / sizes).max())


def wanted_step(
    q: Tensor, k: Tensor, v: Tensor, slope: Tensor, pool: Tensor
) -> tuple[Tensor, Tensor]:
    rows = [t[LIVE, None].double() for t in (q, k, v)]
    o, state = lightning_recurrent(*rows, slope.double(), pool[LIVE_SLOTS].double())
    return o[:, 0], state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 32), (2, 64), (2, 128)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_step_equals_the_recurrence(
    device: torch.device, dtype: torch.dtype, heads: int, head_dim: int, index: torch.dtype
) -> None:
    q, k, v = packed_qkv(B, heads, head_dim, dtype, device)
    slope, pool = layer_0_slopes(heads, device), some_pool(heads, head_dim, device)
    wanted, wanted_state = wanted_step(q, k, v, slope, pool)
    before = pool.clone()
    poisoned = torch.full_like(q, torch.nan)
    slots = torch.tensor(SLOTS, dtype=index, device=device)
    got = decode(q, k, v, slope, pool, slots, out_BHD=poisoned)
    assert got is poisoned
    assert worst_head(got[LIVE], wanted) < TOLERANCE[dtype]
    assert worst_head(pool[LIVE_SLOTS], wanted_state) < 1e-6
    idle = [slot for slot in range(S) if slot not in LIVE_SLOTS]
    assert torch.equal(pool[idle].view(torch.int32), before[idle].view(torch.int32))
    skipped = [row for row in range(B) if row not in LIVE]
    assert torch.equal(got[skipped], torch.zeros_like(got[skipped]))


def test_a_batch_of_padding_touches_nothing(device: torch.device) -> None:
    q, k, v = packed_qkv(3, 2, 32, torch.bfloat16, device)
    pool = some_pool(2, 32, device)
    before = pool.clone()
    q.fill_(torch.nan)
    slots = torch.full((3,), -1, device=device)
    got = decode(q, k, v, layer_0_slopes(2, device), pool, slots)
    assert torch.equal(got, torch.zeros_like(got))
    assert torch.equal(pool.view(torch.int32), before.view(torch.int32))


def test_no_rows_is_no_launch(device: torch.device) -> None:
    q, k, v = packed_qkv(0, 2, 32, torch.bfloat16, device)
    no_slots = torch.empty(0, dtype=torch.int64, device=device)
    got = decode(q, k, v, layer_0_slopes(2, device), some_pool(2, 32, device), no_slots)
    assert got.shape == (0, 2, 32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fused_silu_is_that_of_torch(device: torch.device, dtype: torch.dtype) -> None:
    qkv = packed_qkv(B, 2, 64, dtype, device)
    slope, slots = layer_0_slopes(2, device), torch.tensor(SLOTS, device=device)
    fused_pool, pool = some_pool(2, 64, device), some_pool(2, 64, device)
    fused = decode(*qkv, slope, fused_pool, slots, silu=True)
    plain = decode(*(F.silu(t) for t in qkv), slope, pool, slots)
    # an exponential off by one fp32 ulp may round a value to the neighbour
    bound = 1e-3 if dtype != torch.float32 else 3e-6
    assert worst_head(fused[LIVE], plain[LIVE]) < bound
    assert worst_head(fused_pool[LIVE_SLOTS], pool[LIVE_SLOTS]) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_neighbours_and_order_do_not_matter(device: torch.device, dtype: torch.dtype) -> None:
    q, k, v = packed_qkv(B, 2, 64, dtype, device)
    slope, pool = layer_0_slopes(2, device), some_pool(2, 64, device)
    alone_pool = pool.clone()
    slots = torch.tensor(SLOTS, device=device)
    together = decode(q, k, v, slope, pool, slots)
    for row in reversed(range(B)):
        one = slice(row, row + 1)
        alone = decode(q[one], k[one], v[one], slope, alone_pool, slots[one])
        assert torch.equal(alone[0], together[row])
    assert torch.equal(alone_pool.view(torch.int32), pool.view(torch.int32))


def test_many_steps_stay_near_float64(device: torch.device) -> None:
    """The slowest heads remember every rounding: 20,000 steps on a GPU, few in the interpreter."""
    num_steps, heads, head_dim = (20_000, 64, 128) if device.type == "cuda" else (200, 2, 32)
    slope = slopes(64, 80, 78)[-heads:].to(device)
    q, k, v = (F.silu(t) for t in packed_qkv(num_steps, heads, head_dim, torch.float32, device))
    pool, slots = q.new_zeros(1, heads, head_dim, head_dim), torch.zeros(1, device=device).int()
    o_THD = torch.empty_like(q)
    for t in range(num_steps):
        one = slice(t, t + 1)
        decode(q[one], k[one], v[one], slope, pool, slots, out_BHD=o_THD[one])
    for head in range(heads):
        one = slice(head, head + 1)
        history = [t[None, :, one].double() for t in (q, k, v)]
        wanted, state = lightning_chunked(*history, slope[one].double())
        assert worst_head(o_THD[-100:, one], wanted[0, -100:]) < 2e-4
        assert worst_head(pool[:, one], state) < 2e-4


@pytest.mark.parametrize("layer", [0, 78])
def test_many_steps_of_the_reference_stay_near_float64(layer: int) -> None:
    num_steps, picked = 20_000, [0, 31, 62, 63]
    slope = slopes(64, 80, layer)[picked]
    qkv = packed_qkv(num_steps, len(picked), 8, torch.bfloat16, torch.device("cpu"))
    q, k, v = (F.silu(t).float() for t in qkv)
    state, outputs = torch.zeros(1, len(picked), 8, 8), []
    for t in range(num_steps):
        outputs.append(lightning_step_(q[t, None], k[t, None], v[t, None], slope, state))
    history = (t[None].double() for t in (q, k, v))
    wanted, wanted_state = lightning_chunked(*history, slope.double())
    assert worst_head(torch.cat(outputs[-500:]), wanted[0, -500:]) < 2e-4
    assert worst_head(state, wanted_state) < 2e-4


@pytest.mark.gpu
def test_a_captured_step_follows_the_slots_it_is_given(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a CUDA device")
    q, k, v = packed_qkv(B, 2, 128, torch.bfloat16, device)
    slope, pool = layer_0_slopes(2, device), some_pool(2, 128, device)
    slots = torch.full((B,), -1, device=device)
    out = torch.full_like(q, torch.nan)
    decode(q, k, v, slope, pool, slots, silu=True, out_BHD=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(q, k, v, slope, pool, slots, silu=True, out_BHD=out)
    wanted_pool = pool.clone()
    slots.copy_(torch.tensor(SLOTS))
    wanted = decode(q, k, v, slope, wanted_pool, slots, silu=True)
    graph.replay()
    assert torch.equal(out, wanted)
    assert torch.equal(pool.view(torch.int32), wanted_pool.view(torch.int32))


@pytest.mark.gpu
def test_a_slot_beyond_2_to_the_31_values_is_addressed(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs 9 GB on a CUDA device")
    q, k, v = packed_qkv(1, 64, 128, torch.bfloat16, device)
    slope = layer_0_slopes(64, device)
    pool = torch.empty(2200, 64, 128, 128, device=device)
    pool[[0, 2199]] = 1.0
    near, far = (
        decode(q, k, v, slope, pool, torch.tensor([slot], device=device)) for slot in (0, 2199)
    )
    assert torch.equal(near, far)
    assert torch.equal(pool[0], pool[2199])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("slots", torch.zeros(4).long(), "slots has shape [4], wanted [5]: one a row of q"),
        ("slots", torch.zeros(5), "slots is torch.float32, wanted torch.int32 or torch.int64"),
        ("slots", torch.tensor([0, 1, 2, 3, S]), f"slots[4] is {S}, wanted below {S}"),
        ("slots", torch.tensor([0, 1, 2, 0, -1]), "slots[0] and slots[3] are both 0"),
        ("pool", torch.zeros(S, 3, 32, 32), "pool has shape [9, 3, 32, 32]"),
        ("slope", torch.zeros(2, device="meta"), "slope is on meta, wanted cpu"),
        ("out", torch.zeros(B, 2, 64), "out has shape [5, 2, 64], wanted [5, 2, 32] as q"),
        ("out", torch.zeros(B, 2, 32).half(), "out is torch.float16, wanted torch.bfloat16"),
    ],
)
def test_bad_input_is_refused(name: str, value: Tensor, said: str) -> None:
    cpu = torch.device("cpu")
    q, k, v = packed_qkv(B, 2, 32, torch.bfloat16, cpu)
    given = {
        "slope": layer_0_slopes(2, cpu),
        "pool": torch.zeros(S, 2, 32, 32),
        "slots": torch.tensor(SLOTS),
        "out": torch.zeros_like(q, memory_format=torch.contiguous_format),
    }
    given[name] = value
    with pytest.raises(ValueError, match=re.escape(said)):
        check_decode(q, k, v, *given.values())
