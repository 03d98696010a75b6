"""Lightning attention as the model calls it; the tensors' device decides which kernel runs.

Triton on CUDA, the torch reference elsewhere; nothing outside this package knows which. State and
decay are fp32 everywhere. Shapes: B rows, T tokens, H heads, D head dim (32, 64 or 128), N packed
sequences, S slots of a state pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from m1serve.kernels import checks
from m1serve.kernels.attention import attend
from m1serve.kernels.packed import walk_counts, walk_pieces_on, walk_sequences
from m1serve.kernels.plan import NO_SLOT, Snapshot, rounds
from m1serve.kernels.reference import lightning_chunked, lightning_decode_pool, lightning_step_
from m1serve.kernels.slots import check_owners, check_snapshots, state_slots

__all__ = [
    "NO_SLOT",
    "Snapshot",
    "lightning_attention",
    "lightning_decode",
    "lightning_prefill",
    "lightning_rows",
    "lightning_rows_step",
]


def lightning_prefill(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    slope_H: Tensor,
    *,
    cu_seqlens: Sequence[int] | Tensor,
    pool_SHDD: Tensor | None = None,
    initial_slots: Sequence[int] | Tensor | None = None,
    final_slots: Sequence[int] | Tensor | None = None,
    snapshots: Sequence[Snapshot] = (),
    out_THD: Tensor | None = None,
) -> Tensor:
    """Outputs [T, H, D], in q's dtype, of packed sequences; states come from and go to the pool.

    q, k, v: bf16, fp16 or fp32, any token and head strides, so that views of one packed projection
    need no copy. Sequence n is tokens cu_seqlens[n] to cu_seqlens[n + 1], starts from the state in
    slot initial_slots[n] of the fp32 pool and leaves its last one in final_slots[n]; NO_SLOT starts
    from zeros or keeps nothing, None is NO_SLOT for all. The two may be the same slot. `snapshots`
    keep states in between. `out` must have memory of its own. A ValueError comes before any launch,
    also where a gradient is wanted: there are none.
    """
    checks.check_qkv(q_THD, k_THD, v_THD)
    T, H, D = q_THD.shape
    checks.check_slope(slope_H, H)
    checks.check_devices(q_THD.device, slope=slope_H)
    bounds = checks.sequence_bounds(cu_seqlens, T)
    initial = state_slots(initial_slots, pool_SHDD, "initial_slots", len(bounds) - 1)
    final = state_slots(final_slots, pool_SHDD, "final_slots", len(bounds) - 1)
    if pool_SHDD is not None:
        checks.check_pool(pool_SHDD, H, D)
        checks.check_devices(q_THD.device, pool=pool_SHDD)
    check_snapshots(snapshots, bounds, pool_SHDD)
    check_owners(initial, final, snapshots)
    if out_THD is not None:
        checks.check_out(out_THD, q_THD, k_THD, v_THD)
    given = [q_THD, k_THD, v_THD, *([] if pool_SHDD is None else [pool_SHDD])]
    _check_no_gradients(*given)
    if out_THD is None:
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    run = walk_pieces_on(q_THD.device)
    with torch.no_grad():
        for pieces in rounds(bounds, initial, final, snapshots):
            run(q_THD, k_THD, v_THD, out_THD, slope_H, pieces, pool_SHDD, pool_SHDD)
    return out_THD


def lightning_decode(
    q_BHD: Tensor,
    k_BHD: Tensor,
    v_BHD: Tensor,
    slope_H: Tensor,
    pool_SHDD: Tensor,
    slot_B: Tensor,
    *,
    silu: bool = False,
    out_BHD: Tensor | None = None,
) -> Tensor:
    """Outputs [B, H, D], in q's dtype, of one token a row; the slots' states are updated in place.

    Row b owns slot slot_B[b] of the fp32 pool (int32 or int64, on q's device). A negative slot is a
    row to skip: zeros out, no state touched. `silu` applies SiLU to q, k and v first. On CUDA
    nothing waits for the device, so the step can be captured in a graph.
    """
    checks.check_decode(q_BHD, k_BHD, v_BHD, slope_H, pool_SHDD, slot_B, out_BHD)
    _check_no_gradients(q_BHD, k_BHD, v_BHD, pool_SHDD)
    if q_BHD.is_cuda:
        from m1serve.kernels.decode import decode

        return decode(
            q_BHD, k_BHD, v_BHD, slope_H, pool_SHDD, slot_B, silu=silu, out_BHD=out_BHD
        )  # fmt: skip
    o_BHD = lightning_decode_pool(q_BHD, k_BHD, v_BHD, slope_H, pool_SHDD, slot_B, silu=silu)
    return o_BHD if out_BHD is None else out_BHD.copy_(o_BHD)


def lightning_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    slope_H: Tensor,
    *,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    initial_state_NHDD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [T, H, D], in q's dtype, and fp32 states [N, H, D, D] after N packed sequences.

    Differentiable in q, k, v and the initial states (None: zeros), through either result;
    deterministic. Without cu_seqlens all tokens are one sequence.
    """
    checks.check_qkv(q_THD, k_THD, v_THD)
    T, H, D = q_THD.shape
    checks.check_slope(slope_H, H)
    checks.check_devices(q_THD.device, slope=slope_H)
    bounds = checks.sequence_bounds([0, T] if cu_seqlens is None else cu_seqlens, T)
    N = len(bounds) - 1
    if initial_state_NHDD is not None:
        checks.check_states(initial_state_NHDD, N, H, D)
        checks.check_devices(q_THD.device, initial_state=initial_state_NHDD)
    walk = walk_sequences(bounds, q_THD.device)
    return attend(q_THD, k_THD, v_THD, slope_H, initial_state_NHDD, walk, N)


def lightning_rows(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHD: Tensor,
    slope_H: Tensor,
    state_BHDD: Tensor | None = None,
    count_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, H, D] and fp32 states [B, H, D, D] after each row's first `count_B` tokens.

    No state means zeros, no counts all T; counts stay on the device. Outputs past a row's count
    mean nothing. The given state is not modified. Differentiable. Outputs are fp32 on the CPU and
    in q's dtype on CUDA; there a head dim without kernels, as in tiny models, takes the reference.
    """
    checks.check_rows(q_BTHD, state_BHDD)
    if not _has_kernels(q_BTHD):
        return lightning_chunked(q_BTHD, k_BTHD, v_BTHD, slope_H, state_BHDD, count_B)
    B, T = q_BTHD.shape[:2]
    q_THD, k_THD, v_THD = (torch.flatten(t, 0, 1) for t in (q_BTHD, k_BTHD, v_BTHD))
    if count_B is None:
        walk = walk_sequences(range(0, B * T + 1, T), q_BTHD.device)
    else:
        walk = walk_counts(count_B, T)
    checks.check_qkv(q_THD, k_THD, v_THD)
    checks.check_slope(slope_H, q_THD.shape[1])
    if state_BHDD is not None:
        checks.check_states(state_BHDD, B, *q_THD.shape[1:])
    o_THD, after_BHDD = attend(q_THD, k_THD, v_THD, slope_H, state_BHDD, walk, B)
    return o_THD.view(B, T, *o_THD.shape[1:]), after_BHDD


def lightning_rows_step(
    q_BHD: Tensor,
    k_BHD: Tensor,
    v_BHD: Tensor,
    slope_H: Tensor,
    state_BHDD: Tensor,
    slot_B: Tensor,
    *,
    silu: bool = False,
) -> Tensor:
    """fp32 outputs [B, H, D] on the CPU, in q's dtype on CUDA, of one token a row.

    `slot_B` is `row_slots`. The caller's fp32 state is updated in place, except in rows without a
    slot.
    """
    if not _has_kernels(q_BHD):
        if silu:
            q_BHD, k_BHD, v_BHD = (F.silu(t) for t in (q_BHD, k_BHD, v_BHD))
        q_BHD, k_BHD, v_BHD = (t.to(state_BHDD.dtype) for t in (q_BHD, k_BHD, v_BHD))
        return lightning_step_(q_BHD, k_BHD, v_BHD, slope_H, state_BHDD, slot_B >= 0)
    return lightning_decode(q_BHD, k_BHD, v_BHD, slope_H, state_BHDD, slot_B, silu=silu)


def row_slots(num_rows: int, count_B: Tensor | None, device: torch.device) -> Tensor:
    """int64 [B]: each row's own number, NO_SLOT where its count is 0; no counts: all have one.

    The same for all layers of a step, which costs a GPU four launches.
    """
    row_B = torch.arange(num_rows, device=device)
    return row_B if count_B is None else torch.where(count_B > 0, row_B, NO_SLOT)


def _check_no_gradients(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise ValueError(
            "an input requires a gradient, which this operator does not have: wanted "
            "lightning_attention, or torch.no_grad()"
        )


def _has_kernels(t: Tensor) -> bool:
    return t.is_cuda and t.shape[-1] in checks.HEAD_DIMS
