"""Programmatic dependent launch on Hopper: a kernel's programs may start while the last one's end.

Every kernel launched with `**pdl(t)` calls `wait(WAIT)` in every program before it reads what
others wrote or writes anything, and `release(WAIT)` where the next launch may start: before the
wait, unless the next kernel reads before its own wait what this one waits for.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001  (a jit kernel's annotations are constexpr only)
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
def wait(WAIT: tl.constexpr) -> None:
    """Until all before this launch is done and seen."""
    if WAIT:
        cuda.gdc_wait()


@triton.jit
def release(WAIT: tl.constexpr) -> None:
    """The next launch's programs may start once every program of this one is here or has ended."""
    if WAIT:
        cuda.gdc_launch_dependents()


@triton.jit
def bring_to_l2(pointers) -> None:
    """Asks for the 128 bytes around each address; a mere hint, so also for what may yet change."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
