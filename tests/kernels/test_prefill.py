"""The walks in the interpreter or on a GPU, and what the public operators promise anywhere.

Errors are judged in the worst head: a total hides the head that forgets fastest.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from m1serve.kernels.decay import slopes
from m1serve.kernels.lightning import NO_SLOT, Snapshot, lightning_attention, lightning_prefill
from m1serve.kernels.plan import Chain, Piece, Plan, Run
from m1serve.kernels.reference import lightning_recurrent

H = 2
# the fastest and the slowest to forget of M1's first layer
SLOPE = slopes(64, 80, 0)[[0, 63]]
BARS = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 3e-3}


def packed(
    num_tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """q, k, v as views of one projection, interleaved head by head as M1's is."""
    generator = torch.Generator().manual_seed(num_tokens)
    qkv = torch.randn(num_tokens, H, 3 * head_dim, generator=generator).to(device, dtype)
    return list(qkv.split(head_dim, -1))


def states(count: int, head_dim: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, H, head_dim, head_dim, generator=generator).to(device)


def worst_head(got: Tensor, wanted: Tensor, head_axis: int) -> float:
    others = [axis for axis in range(wanted.dim()) if axis != head_axis]
    errors = (got.double() - wanted).square().sum(others) / wanted.square().sum(others)
    return float(errors.sqrt().max())


def exact(
    qkv: list[Tensor], slope: Tensor, before: Tensor | None, *, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    q, k, v = ((t.flip(0) if reverse else t).double()[None] for t in qkv)
    state = None if before is None else before.double()[None]
    o, after = lightning_recurrent(q, k, v, slope.to(q.device), state)
    return o[0].flip(0) if reverse else o[0], after[0]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(32, torch.float32), (32, torch.bfloat16), (64, torch.float16), (128, torch.bfloat16)],
)
def test_a_walk_equals_the_recurrence(
    device: torch.device, head_dim: int, dtype: torch.dtype, reverse: bool
) -> None:
    from m1serve.kernels.walk import walk

    lengths = [70, 1, 64]
    qkv = packed(sum(lengths), head_dim, dtype, device)
    pool = states(7, head_dim, device)
    pool[3:] = torch.nan
    before = pool.clone()
    o = torch.full_like(qkv[0], torch.nan, memory_format=torch.contiguous_format)
    items = torch.tensor([[0, 70, 0, 3], [70, 1, NO_SLOT, 4], [71, 64, 2, NO_SLOT]], device=device)
    walk(*qkv, o, SLOPE.to(device), items, pool, pool, reverse=reverse)
    for row, count, source, target in items.tolist():
        parts = [t[row : row + count] for t in qkv]
        start = None if source == NO_SLOT else before[source]
        wanted, wanted_state = exact(parts, SLOPE, start, reverse=reverse)
        assert worst_head(o[row : row + count], wanted, 1) < BARS[dtype]
        if target != NO_SLOT:
            assert worst_head(pool[target], wanted_state, 0) < BARS[dtype]
    assert torch.equal(pool[:3], before[:3])
    assert pool[5:].isnan().all()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_equal_the_recurrence(
    device: torch.device, dtype: torch.dtype, reverse: bool
) -> None:
    """Cut by hand: the planner keeps segments longer than an interpreter should walk."""
    from m1serve.kernels.prefill import Work, run_work

    rows = [(0, 64), (64, 128), (192, 70)]
    if reverse:
        rows = [(262 - row - count, count) for row, count in rows]
    targets = [NO_SLOT, NO_SLOT, 1]
    spans = [(0, 64, 0), (64, 64, 1), (128, 64, NO_SLOT)]
    plan = Plan(
        segments=tuple(
            Piece(row, count, index, target)
            for index, ((row, count), target) in enumerate(zip(rows, targets, strict=True))
        ),
        runs=tuple(
            Run(
                262 - start - count if reverse else start,
                count,
                segment,
                64 if segment == 1 else 0,
                count,
            )
            for start, count, segment in spans
        ),
        chains=(Chain(0, 3, 0, 2),),
        columns=32,
    )
    qkv = packed(262, 32, dtype, device)
    pool = states(2, 32, device)
    o = torch.full_like(qkv[0], torch.nan, memory_format=torch.contiguous_format)
    wanted, wanted_state = exact(qkv, SLOPE, pool[0], reverse=reverse)
    work = Work(plan, device)
    run_work(*qkv, o, SLOPE.to(device), work, pool, pool, reverse=reverse)
    assert worst_head(o, wanted, 1) < BARS[dtype]
    assert worst_head(pool[1], wanted_state, 0) < BARS[dtype]


def test_prefill_takes_states_from_the_pool_and_leaves_them_there() -> None:
    qkv = packed(130, 32, torch.float32, torch.device("cpu"))
    pool = states(5, 32, torch.device("cpu"))
    before = pool.clone()
    o = lightning_prefill(
        *qkv,
        SLOPE,
        cu_seqlens=[0, 100, 100, 130],
        pool_SHDD=pool,
        initial_slots=[3, 1, NO_SLOT],
        final_slots=[3, 2, 0],
    )
    wanted, wanted_state = exact([t[:100] for t in qkv], SLOPE, before[3])
    assert worst_head(o[:100], wanted, 1) < 1e-5
    assert worst_head(pool[3], wanted_state, 0) < 1e-5
    # a sequence of no tokens hands its state on
    assert torch.equal(pool[2], before[1])
    assert worst_head(pool[0], exact([t[100:] for t in qkv], SLOPE, None)[1], 0) < 1e-5
    assert torch.equal(pool[[1, 4]], before[[1, 4]])


def test_a_snapshot_is_the_state_of_a_shorter_call() -> None:
    qkv = packed(90, 32, torch.float32, torch.device("cpu"))
    pool = torch.full((3, H, 32, 32), torch.nan)
    o = lightning_prefill(
        *qkv,
        SLOPE,
        cu_seqlens=[0, 90],
        pool_SHDD=pool,
        final_slots=[0],
        snapshots=[Snapshot(sequence=0, num_tokens=37, slot=2)],
    )
    wanted, wanted_state = exact(qkv, SLOPE, None)
    assert worst_head(o, wanted, 1) < 1e-5
    assert worst_head(pool[0], wanted_state, 0) < 1e-5
    assert worst_head(pool[2], exact([t[:37] for t in qkv], SLOPE, None)[1], 0) < 1e-5


def test_gradients_equal_those_of_the_recurrence() -> None:
    from m1serve.kernels.attention import attend
    from m1serve.kernels.packed import walk_sequences

    bounds = [0, 70, 71, 100]
    leaves = [
        t.double().requires_grad_() for t in packed(100, 8, torch.float32, torch.device("cpu"))
    ]
    initial = states(3, 8, torch.device("cpu")).double().requires_grad_()
    walk = walk_sequences(bounds, torch.device("cpu"))
    o, after = attend(*leaves, SLOPE, initial, walk, 3)
    got = torch.autograd.grad(o.sin().sum() + after.cos().sum(), [*leaves, initial])
    loss = torch.zeros((), dtype=torch.float64)
    for n, (begin, end) in enumerate(pairwise(bounds)):
        parts = [t[None, begin:end] for t in leaves]
        o, after = lightning_recurrent(*parts, SLOPE, initial[n, None])
        loss = loss + o.sin().sum() + after.cos().sum()
    wanted = torch.autograd.grad(loss, [*leaves, initial])
    for one, other in zip(got, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-9)


def test_attention_is_differentiable_through_either_result() -> None:
    qkv = [
        t.detach().clone().requires_grad_()
        for t in packed(20, 32, torch.float32, torch.device("cpu"))
    ]
    o, after = lightning_attention(*qkv, SLOPE)
    assert o.shape == qkv[0].shape
    assert after.shape == (1, H, 32, 32)
    only_k = torch.autograd.grad(after.sum(), qkv, allow_unused=True, retain_graph=True)
    assert only_k[1].abs().sum() > 0
    assert torch.autograd.grad(o.sum(), qkv)[0].abs().sum() > 0


SLOTS = torch.zeros(2, H, 32, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": [0, 9]}, "ends at 9, wanted 10"),
        ({"final_slots": [0]}, "without a pool"),
        ({"pool_SHDD": SLOTS, "final_slots": [2]}, "is 2, wanted below 2"),
        ({"pool_SHDD": SLOTS, "final_slots": [0, 1]}, "2 entries, wanted 1"),
        ({"pool_SHDD": SLOTS.double()}, "wanted torch.float32"),
        (
            {"cu_seqlens": [0, 5, 10], "pool_SHDD": SLOTS, "final_slots": [1, 1]},
            "writes slot 1 twice",
        ),
        (
            {
                "cu_seqlens": [0, 5, 10],
                "pool_SHDD": SLOTS,
                "initial_slots": [0, 1],
                "final_slots": [1, 0],
            },
            "starts from slot 0, which sequence 1 overwrites",
        ),
        ({"pool_SHDD": SLOTS, "snapshots": [Snapshot(0, 11, 0)]}, "wanted 1 to 10 tokens"),
        ({"pool_SHDD": SLOTS, "snapshots": [Snapshot(1, 1, 0)]}, "none of the 1 sequences"),
        ({"pool_SHDD": SLOTS, "snapshots": [Snapshot(0, 1, 2)]}, "no slot in a pool of 2"),
        ({"snapshots": [Snapshot(0, 1, 0)]}, "without a pool"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    qkv = packed(10, 32, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        lightning_prefill(*qkv, SLOPE, **({"cu_seqlens": [0, 10]} | change))  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
def test_a_captured_prefill_replays_on_other_inputs() -> None:
    """Long enough to be cut into segments, so that every kernel of a prefill is captured."""
    device = torch.device("cuda")
    slope = slopes(64, 80, 78)[:8].to(device)
    qkv = torch.randn(8192, 8, 384, device=device).bfloat16()
    q, k, v = qkv.split(128, -1)
    bounds = [0, 8192]
    lightning_prefill(q, k, v, slope, cu_seqlens=bounds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = lightning_prefill(q, k, v, slope, cu_seqlens=bounds)
    qkv.copy_(torch.randn_like(qkv))
    graph.replay()
    assert torch.equal(o, lightning_prefill(q, k, v, slope, cu_seqlens=bounds))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a CUDA device")
def test_a_plan_made_on_one_stream_serves_another() -> None:
    device = torch.device("cuda")
    slope = slopes(64, 80, 78)[:8].to(device)
    q, k, v = torch.randn(8256, 8, 384, device=device).bfloat16().split(128, -1)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        first = lightning_prefill(q, k, v, slope, cu_seqlens=[0, 8256])
    with torch.cuda.stream(torch.cuda.Stream()):
        second = lightning_prefill(q, k, v, slope, cu_seqlens=[0, 8256])
    torch.cuda.synchronize()
    assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("through", ["outputs, expanded", "states", "both"])
@pytest.mark.parametrize(("head_dim", "dtype"), [(128, torch.bfloat16), (32, torch.float32)])
def test_gradients_on_a_gpu_equal_the_reference(
    head_dim: int, dtype: torch.dtype, through: str
) -> None:
    """From whichever result, dense or expanded, to inputs and an initial state that is expanded."""
    device, bounds = torch.device("cuda"), [0, 130, 131, 300]
    slope = slopes(64, 80, 0)[[0, 63]].to(device)
    leaves = [t.contiguous() for t in packed(300, head_dim, dtype, device)]
    shared = states(1, head_dim, device)

    weight = torch.randn(300, 2, head_dim, device=device, dtype=torch.float64)
    state_weight = torch.randn(3, 2, head_dim, head_dim, device=device, dtype=torch.float64)

    def loss(o: Tensor, after: Tensor) -> Tensor:
        from_states = (after.double() * state_weight).sum()
        if through == "states":
            return from_states
        return o.sum() if through != "both" else from_states + (o.double() * weight).sum()

    ours = [t.detach().requires_grad_() for t in (*leaves, shared)]
    o, after = lightning_attention(
        *ours[:3], slope, cu_seqlens=bounds, initial_state_NHDD=ours[3].expand(3, -1, -1, -1)
    )
    got = torch.autograd.grad(loss(o, after), ours, allow_unused=True)
    exact_leaves = [t.detach().double().requires_grad_() for t in (*leaves, shared)]
    results = [
        lightning_recurrent(*(t[None, begin:end] for t in exact_leaves[:3]), slope, exact_leaves[3])
        for begin, end in pairwise(bounds)
    ]
    o = torch.cat([o[0] for o, _ in results])
    after = torch.cat([after for _, after in results])
    wanted = torch.autograd.grad(loss(o, after), exact_leaves, allow_unused=True)
    for mine, exact_gradient in zip(got, wanted, strict=True):
        if exact_gradient is None:
            assert mine is None or not mine.any()
        else:
            assert mine is not None
            assert worst_head(mine, exact_gradient, 1) < 2 * BARS[dtype]


def test_an_output_in_the_inputs_memory_is_refused() -> None:
    q, k, v = packed(10, 32, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="out lies in the memory of q, wanted memory of its own"):
        lightning_prefill(q, k, v, SLOPE, cu_seqlens=[0, 10], out_THD=v)
    with pytest.raises(ValueError, match="wanted no value stored twice"):
        lightning_prefill(
            q, k, v, SLOPE, cu_seqlens=[0, 10], out_THD=torch.empty(1, H, 32).expand(10, -1, -1)
        )


def test_a_gradient_that_prefill_does_not_have_is_refused() -> None:
    q, k, v = packed(10, 32, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="wanted lightning_attention"):
        lightning_prefill(q.clone().requires_grad_(), k, v, SLOPE, cu_seqlens=[0, 10])


@pytest.mark.parametrize("reverse", [False, True])
def test_planned_pieces_equal_their_reference(device: torch.device, reverse: bool) -> None:
    """Also after the slopes changed in place: what a head remembers is read again."""
    from m1serve.kernels.prefill import run_pieces, windows
    from m1serve.kernels.reference import walk_pieces

    pieces = (Piece(0, 70, 0, 1), Piece(70, 0, 2, 3), Piece(71, 65, NO_SLOT, NO_SLOT))
    qkv = packed(136, 32, torch.float32, device)
    slope = slopes(64, 80, 0)[[0, 63]].to(device)
    assert windows(slope)[0] < windows(slope)[1]
    slope.mul_(0.01)
    before = windows(slope)
    assert before == windows(slope.clone())
    results = []
    for run in (run_pieces, walk_pieces):
        pool, o = states(4, 32, device), torch.zeros_like(qkv[0])
        run(*qkv, o, slope, pieces, pool, pool, reverse=reverse)
        results.append((o, pool))
    (o, pool), (wanted, wanted_pool) = results
    assert torch.allclose(o, wanted, rtol=1e-4, atol=1e-4)
    assert torch.allclose(pool, wanted_pool, rtol=1e-4, atol=1e-4)
