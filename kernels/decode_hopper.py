"""One decode step of lightning attention for Hopper: head dim 128, layouts said (Gluon).

A program owns 64 value columns of one head's state, a warp 16 of its keys: q, k and v are asked for
before the slot is known, then all of the state, and SiLU runs while the state is under way, once an
element, shared through shared memory. Where a step has many programs, those of the next step bring
their states to L2 while this one ends. `kernels.decode` has the contract and the portable kernel.
Shapes: B rows, H heads, D = 128, S slots; a tile is W x J x V: warps, keys of a warp, columns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202, E741  (a jit kernel's annotations are constexpr only)
from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

HEAD_DIM = 128
COLUMNS = 64
WARPS = 8
# programs of a step from which on the states are asked for before the step before has ended
AHEAD_FROM = 4096
# asks ptxas for a schedule that issues all of the state's loads before it waits for q, k or v
MAX_REGISTERS = 64

# Gluon's names up to triton 3.8, and from 3.9 on
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


def fits(q_BHD: Tensor) -> bool:
    """Head dim 128 on a Hopper GPU; any number of rows, so that none's bits depend on it."""
    return q_BHD.shape[2] == HEAD_DIM and q_BHD.is_cuda and _is_hopper(q_BHD.device)


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def decode(
    q_BHD: Tensor,
    k_BHD: Tensor,
    v_BHD: Tensor,
    slope_H: Tensor,
    pool_SHDD: Tensor,
    slot_B: Tensor,
    *,
    silu: bool = False,
    out_BHD: Tensor,
) -> Tensor:
    """As `kernels.decode.decode`, for tensors that `fits` accepts."""
    B, H, D = q_BHD.shape
    grid = (D // COLUMNS, H, B)
    decode_kernel[grid](
        q_BHD,
        k_BHD,
        v_BHD,
        out_BHD,
        slope_H,
        pool_SHDD,
        slot_B,
        *q_BHD.stride()[:2],
        *k_BHD.stride()[:2],
        *v_BHD.stride()[:2],
        *out_BHD.stride()[:2],
        pool_SHDD.stride(0),
        pool_SHDD.shape[0],
        SILU=silu,
        D=D,
        V=COLUMNS,
        W=WARPS,
        AHEAD=math.prod(grid) >= AHEAD_FROM,
        num_warps=WARPS,
        maxnreg=MAX_REGISTERS,
        # programs of the next step may start while the last ones of this one end, and wait
        launch_pdl=True,
        # said, because triton 3.9 warns where its default is taken
        enable_fp_fusion=True,
    )
    return out_BHD


@gluon.jit
def decode_kernel(
    Q, K, V_IN, O, SLOPE, POOL, SLOT,
    q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head, pool_slot, num_slots,
    SILU: gl.constexpr, D: gl.constexpr, V: gl.constexpr, W: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    J: gl.constexpr = D // W
    tile: gl.constexpr = gl.BlockedLayout(
        [1, J * V // 128, 4], [1, 128 // V, V // 4], [W, 1, 1], [2, 1, 0]
    )
    keys: gl.constexpr = gl.SliceLayout(2, tile)
    columns: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, tile))
    # a key a thread; and a thread's two columns of what all warps have summed
    line: gl.constexpr = gl.BlockedLayout([1, 1], [32 // J, J], [W, 1], [1, 0])
    sums: gl.constexpr = gl.BlockedLayout([W, V // 32], [1, 32], [1, W], [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    head = gl.program_id(1).to(gl.int64)
    row = gl.program_id(2).to(gl.int64)
    if AHEAD:
        # the slot may be written yet by what runs before, so here it is only a guess
        guess = gl.load(SLOT + row).to(gl.int64)
        if (guess >= 0) & (guess < num_slots):
            share = gl.program_id(0) * (D * V)
            _bring_to_l2(POOL + guess * pool_slot + head * (D * D) + share)
    _wait_for_the_step_before()
    slot = gl.load(SLOT + row).to(gl.int64)
    first = gl.program_id(0) * V
    i_WJ = _keys(J, W, line)
    i_V = first + gl.arange(0, V, columns)
    q_ptr_WJ = Q + row * q_row + head * q_head + i_WJ
    k_ptr_WJ = K + row * k_row + head * k_head + i_WJ
    v_ptr_V = V_IN + row * v_row + head * v_head + i_V
    o_at_V = first + gl.arange(0, V, gl.SliceLayout(0, sums))
    o_ptr_V = O + row * o_row + head * o_head + o_at_V
    # its own room: in that of q or k it would cost another barrier
    o_shared = gl.allocate_shared_memory(gl.float32, [W, V], flat)
    q_WJ, k_WJ, v_V = gl.load(q_ptr_WJ), gl.load(k_ptr_WJ), gl.load(v_ptr_V)
    slope = gl.load(SLOPE + head)
    if (slot < 0) | (slot >= num_slots):
        nothing = gl.zeros([V], gl.float32, gl.SliceLayout(0, sums))
        nothing += gl.where(slot < 0, 0.0, float("nan"))
        gl.store(o_ptr_V, nothing.to(O.dtype.element_ty))
    else:
        # 64-bit throughout: the rows' addresses are then one register pair and constants
        at_WJ = _keys(J, W, keys).to(gl.int64) * D
        at_WJV = at_WJ[:, :, None] + i_V.to(gl.int64)[None, :][:, None, :]
        s_ptr_WJV = POOL + slot * pool_slot + head * (D * D) + at_WJV
        s_WJV = gl.load(s_ptr_WJV)
        # no wait for q, k or v comes before the state's loads
        _barrier()
        q_shared = gl.allocate_shared_memory(gl.float32, [W, J], flat, _activated(q_WJ, SILU))
        k_shared = gl.allocate_shared_memory(gl.float32, [W, J], flat, _activated(k_WJ, SILU))
        k_WJ1 = k_shared.load(keys)[:, :, None]
        v_11V = _activated(v_V, SILU)[None, :][:, None, :]
        s_WJV = _decayed_plus(s_WJV, slope, k_WJ1 * v_11V)
        o_shared.store(gl.sum(s_WJV * q_shared.load(keys)[:, :, None], axis=1))
        # behind the sum, so that ptxas stores the state in one burst
        gl.store(s_ptr_WJV, s_WJV)
        gl.store(o_ptr_V, gl.sum(o_shared.load(sums), axis=0).to(O.dtype.element_ty))


@gluon.jit
def _keys(J: gl.constexpr, W: gl.constexpr, layout: gl.constexpr):
    """The keys 0 to W * J as [W, J]."""
    i_W = gl.arange(0, W, gl.SliceLayout(1, layout))
    return i_W[:, None] * J + gl.arange(0, J, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _activated(x, SILU: gl.constexpr):
    """As `decode._activated`."""
    x_fp32 = x.to(gl.float32)
    if SILU:
        x_fp32 = (x_fp32 / (1.0 + gl.exp(-x_fp32))).to(x.dtype).to(gl.float32)
    return x_fp32


@gluon.jit
def _decayed_plus(s, slope, added):
    """exp(-slope) * s + added, as `decode._decayed_plus`: the factor is kept as a sum."""
    is_slow = slope < 0.25
    lost = slope * (1.0 - slope / 2 * (1.0 - slope / 3 * (1.0 - slope / 4 * (1.0 - slope / 5))))
    large = gl.where(is_slow, 1.0, gl.exp(-slope))
    small = gl.where(is_slow, -lost, 0.0)
    return gl.fma(s, large, gl.fma(s, small, added))


@gluon.jit
def _bring_to_l2(first):
    """Ask for 128 bytes a thread from the address `first` on: 32 KiB in all; a mere hint."""
    gl.inline_asm_elementwise(
        "{ .reg .u32 t; .reg .u64 a; mov.u32 t, %tid.x; mad.wide.u32 a, t, 128, $1; "
        "prefetch.global.L2 [a]; mov.u32 $0, 0; }",
        "=r,l", [first.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _wait_for_the_step_before():
    """Until all before this launch is done and seen; then let the next launch's programs start."""
    for at in gl.static_range(2):
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0" if at == 0 else "griddepcontrol.launch_dependents; // $0",
            "=r", [], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
