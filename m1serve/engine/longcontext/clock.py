"""Seconds of device work on any device, and the peak of its memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_GIB = 2**30


class Clock:
    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object]) -> float:
        """Of one call, the device idle before and after."""
        self.wait()
        begin = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - begin

    def forget_peak(self) -> None:
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        """Since `forget_peak`; None where the device does not say."""
        return torch.cuda.max_memory_allocated() / _GIB if self._is_cuda else None
