"""Which kernels a forward spends its device time in, by what they do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from m1serve.model.hybrid import M1ForCausalLM

# the first that fits a kernel's name counts; elementwise is what remains
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("lightning", ("walk", "run_kernel", "chain_kernel", "lightning", "decode_hopper")),
    (
        "softmax_attention",
        ("flash", "cudnn", "sdpa", "fmha", "paged", "attention", "attend", "join_parts"),
    ),
    ("experts", ("groupproblem", "grouped", "up_kernel", "down_kernel")),
    ("gemm", ("gemm", "nvjet", "cublas", "xmma", "gemv", "linear_kernel", "splitk")),
    ("copies", ("memcpy", "memset")),
)
_EXPERTS = "m1serve: experts"
"""The profiler's range of a layer's experts: their products are cuBLAS's as the dense ones are."""


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


def device_shares(call: Callable[[], object], model: M1ForCausalLM) -> list[Share]:
    """Milliseconds of device time by kind, the largest first; CUDA only."""
    with (
        _named_experts(model),
        profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler,
    ):
        call()
        torch.cuda.synchronize()
    return shares_of(profiler.events())


def shares_of(events: Iterable[FunctionEvent]) -> list[Share]:
    """Of the profiler's events: a product that an operator of the experts launched is theirs."""
    by_kind: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            by_kind[kind_of(event.name)][event.name] += float(event.self_device_time_total) / 1e3
        elif event.kernels and _is_of_experts(event):
            for kernel in event.kernels:
                if kind_of(kernel.name) == "gemm":
                    by_kind["gemm"][kernel.name] -= kernel.duration / 1e3
                    by_kind["experts"][kernel.name] += kernel.duration / 1e3
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


def _is_of_experts(event: FunctionEvent | None) -> bool:
    while event is not None:
        if event.name == _EXPERTS:
            return True
        event = event.cpu_parent
    return False


@contextmanager
def _named_experts(model: M1ForCausalLM) -> Iterator[None]:
    """Within the block the profiler sees each layer's experts as a range."""
    ranges: list[Any] = []

    def enter(*_: object) -> None:
        ranges.append(record_function(_EXPERTS))
        ranges[-1].__enter__()

    def leave(*_: object) -> None:
        ranges.pop().__exit__(None, None, None)

    with ExitStack() as hooks:
        for block in model.blocks:
            moe = block.block_sparse_moe
            for handle in (
                moe.register_forward_pre_hook(enter),
                moe.register_forward_hook(leave),
            ):
                hooks.callback(handle.remove)
        yield
