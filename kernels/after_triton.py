"""Programmatic dependent launch on Hopper: a kernel's programs may start while the last one's end.

Every kernel launched with `**pdl(t)` calls `after(WAIT)` before it touches memory.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda


def pdl(t: Tensor) -> dict[str, bool]:
    """Launch options, and the constexpr WAIT, for a kernel on `t`'s device."""
    if t.is_cuda and _is_hopper(t.device):
        return {"WAIT": True, "launch_pdl": True}
    return {"WAIT": False}


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


@triton.jit
def after(WAIT: tl.constexpr) -> None:
    """Waits until all before this launch is done and seen; then the next launch may start."""
    if WAIT:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
