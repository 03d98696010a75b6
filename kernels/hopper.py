"""Launches the Hopper walk: TMA descriptors and the choice of columns a program owns.

Shapes: T tokens, H heads, D head dim, S state slots, I items.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from m1serve.kernels.walk import pool_strides
from m1serve.kernels.walk_hopper import CHUNK, HEAD_DIM, walk_kernel

SWIZZLED = gl.NVMMASharedLayout(128, 16, 2)
# of q, k and v in flight: what 227 KiB of shared memory hold beside the states and outputs
STAGES = {64: 4, 128: 3}


def walk(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    o_THD: Tensor,
    slope_H: Tensor,
    items_I4: Tensor,
    source_SHDD: Tensor | None,
    target_SHDD: Tensor | None,
    *,
    reverse: bool = False,
    columns: int = 64,
) -> None:
    """As `kernels.walk.walk`, a program for each `columns` (64 or 128) of the value columns."""
    H = q_THD.shape[1]
    pointers = (
        o_THD,
        slope_H if source_SHDD is None else source_SHDD,
        slope_H if target_SHDD is None else target_SHDD,
        items_I4,
        slope_H,
    )
    strides = (
        q_THD.stride(1),
        k_THD.stride(1),
        v_THD.stride(1),
        o_THD.stride(0),
        o_THD.stride(1),
        *pool_strides(source_SHDD),
        *pool_strides(target_SHDD),
    )
    arguments = (
        descriptor(q_THD, CHUNK, HEAD_DIM),
        descriptor(k_THD, CHUNK, HEAD_DIM),
        descriptor(v_THD, CHUNK, columns),
        descriptor(o_THD, CHUNK, columns),
        *pointers,
        *strides,
        H,
        columns,
        STAGES[columns],
        reverse,
    )
    grid = (items_I4.shape[0] * H * (HEAD_DIM // columns), 1, 1)
    # all that triton specialises on: its own lookup would cost the host more than the launch
    kinds = ((t.dtype, t.data_ptr() % 16) for t in pointers)
    key = (q_THD.device, H, columns, reverse, strides, *kinds)
    if key in _compiled:
        _compiled[key][grid](*arguments)
    else:
        _compiled[key] = walk_kernel[grid](
            # said, because triton 3.9 warns where its default is taken
            *arguments, num_warps=4, enable_fp_fusion=True
        )  # fmt: skip


_compiled: dict[tuple[object, ...], Any] = {}


def fits(*tensors_THD: Tensor) -> bool:
    """Whether TMA can read these: bf16, head dim 128, steps of 16 bytes, on a Hopper GPU."""
    return all(
        t.is_cuda
        and _is_hopper(t.device)
        and t.dtype == torch.bfloat16
        and t.shape[2] == HEAD_DIM
        and t.shape[0] > 0
        and t.data_ptr() % 16 == 0
        and t.stride(2) == 1
        and all(step > 0 and step % 8 == 0 for step in t.stride()[:2])
        and t.shape[1] * t.stride(1) < 2**31
        for t in tensors_THD
    )


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def descriptor(t_THD: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of tiles of some tokens and columns of a head; rows past the last token read as zeros."""
    T, H, D = t_THD.shape
    width = (H - 1) * t_THD.stride(1) + D
    return TensorDescriptor(t_THD, [T, width], [t_THD.stride(0), 1], [rows, columns], SWIZZLED)
