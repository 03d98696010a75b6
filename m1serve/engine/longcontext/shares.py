"""Which kernels a forward spends its device time in, by what they do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

# the first that fits a kernel's name counts; elementwise is what remains
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("lightning", ("walk", "run_kernel", "chain_kernel", "lightning", "decode_hopper")),
    ("softmax_attention", ("flash", "cudnn", "sdpa", "fmha", "paged", "attention")),
    ("experts", ("groupproblem", "grouped", "up_kernel", "down_kernel")),
    ("gemm", ("gemm", "nvjet", "cublas", "xmma", "gemv", "linear_kernel", "splitk")),
    ("copies", ("memcpy", "memset")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    kind: str
    ms: float
    kernels: tuple[tuple[str, float], ...]
    """The most expensive ones, with their milliseconds"""


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    for kind, parts in KINDS:
        if any(part in name for part in parts):
            return kind
    return "elementwise"


def device_shares(call: Callable[[], object]) -> list[Share]:
    """Milliseconds of device time by kind, the largest first; CUDA only."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    by_kind: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in profiler.key_averages():
        ms = float(event.self_device_time_total) / 1e3
        if ms > 0:
            by_kind[kind_of(event.key)][event.key] += ms
    shares = [
        Share(
            kind=kind,
            ms=sum(kernels.values()),
            kernels=tuple(
                (name[:80], round(ms, 3))
                for name, ms in sorted(kernels.items(), key=lambda item: -item[1])[:6]
            ),
        )
        for kind, kernels in by_kind.items()
    ]
    return sorted(shares, key=lambda share: -share.ms)
