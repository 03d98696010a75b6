"""How long device work takes: events, a cold L2, CUDA graphs; and the two ceilings of a run."""

# mypy: allow-untyped-calls
from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

# several times the 50-60 MB of L2 of a Hopper chip
FLUSH_BYTES = 256 << 20
# about two milliseconds: the host has queued the call before the device is free to start it
SPIN_CYCLES = 4_000_000
GEMM_SIDE = 8192


def cold_ms(call: Call, *, spend_ms: float = 250.0) -> float:
    """Median milliseconds of one call on a cold L2, in about `spend_ms` of device time, or in two.

    L2 is emptied by reading, so that no write-back of dirty lines falls into the measurement.
    """
    flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    call()
    once = _sample_ms(call, flush)
    repeats = int(min(max(spend_ms / max(once, 0.01), 5 if once < 1e3 else 2), 40))
    return statistics.median(_sample_ms(call, flush) for _ in range(repeats))


def _sample_ms(call: Call, flush: torch.Tensor) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.sum()
    torch.cuda._sleep(SPIN_CYCLES)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def graph_ms(calls: Sequence[Call], *, spend_ms: float = 200.0) -> float:
    """Median milliseconds a call, all of them captured in one CUDA graph that is replayed.

    L2 is cold when the calls together touch far more memory than it holds.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples: list[float] = []
    while len(samples) < 5 or (sum(samples) < spend_ms and len(samples) < 100):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end))
    return statistics.median(samples) / len(calls)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reaches in this run; floors are counted against it."""

    copy_tb_s: float
    gemm_tflop_s: float


def measure_ceilings() -> Ceilings:
    """A 4.3 GB device copy (bytes read and written) and an 8192-cubed bf16 product."""
    ceilings = Ceilings(_copy_tb_s(), _gemm_tflop_s())
    torch.cuda.empty_cache()
    return ceilings


def _copy_tb_s() -> float:
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    ms = cold_ms(lambda: target.copy_(source), spend_ms=60)
    return 2 * source.numel() * source.element_size() / ms / 1e9


def _gemm_tflop_s() -> float:
    ms = cold_ms(_product(), spend_ms=60)
    return 2 * GEMM_SIDE**3 / ms / 1e9


def sustained_gemm_tflop_s(seconds: float = 3.0) -> float:
    """The same product without a pause, over the second half of so many seconds.

    What a chip at its power limit keeps up: less than in a few milliseconds from rest.
    """
    product = _product()
    count = max(2, int(seconds / 1.5e-3))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for i in range(count):
        if i == count // 2:
            start.record()
        product()
    end.record()
    end.synchronize()
    ms = float(start.elapsed_time(end)) / (count - count // 2)
    return 2 * GEMM_SIDE**3 / ms / 1e9


def _product() -> Call:
    a, b = torch.randn(2, GEMM_SIDE, GEMM_SIDE, device="cuda").bfloat16()
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)
