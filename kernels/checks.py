"""What the public operators refuse before any launch: each error says what, got and wanted.

Nothing here reads a device tensor's values: shapes, strides and dtypes only, or host data.
Shapes: T tokens or rows, H heads, D head dim, S slots, N sequences.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (32, 64, 128)
MAX_ROWS = 65535
"""Of a decode step: what a CUDA grid holds."""


def check_qkv(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
    """q, k and v [T, H, D]: one dtype of DTYPES, one device, D in HEAD_DIMS, stride 1 along D."""
    named = {"q": q_THD, "k": k_THD, "v": v_THD}
    check_tensors(**named)
    for name, tensor in named.items():
        if tensor.dim() != 3:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, wanted [tokens, heads, dim]")
        if tensor.shape != q_THD.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, wanted that of q, {list(q_THD.shape)}"
            )
        check_last_dim(tensor, name)
    check_dtypes(q_THD.dtype, **named)
    check_devices(q_THD.device, **named)
    if q_THD.shape[1] == 0:
        raise ValueError(f"q has shape {list(q_THD.shape)}, wanted at least one head")
    if q_THD.shape[2] not in HEAD_DIMS:
        raise ValueError(f"head_dim is {q_THD.shape[2]}, wanted one of {HEAD_DIMS}")


def check_tensors(**tensors: object) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}, wanted a torch.Tensor")


def check_last_dim(tensor: Tensor, name: str) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(-1)} along its last dim, wanted 1: "
            "pass a view that keeps it, or .contiguous()"
        )


def check_dtypes(wanted: torch.dtype, **tensors: Tensor) -> None:
    """All tensors have the dtype `wanted`, and it is one of DTYPES."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}, wanted one of {DTYPES}")
        if tensor.dtype != wanted:
            raise ValueError(f"{name} is {tensor.dtype}, wanted {wanted} as the others")


def check_devices(wanted: torch.device, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != wanted:
            raise ValueError(f"{name} is on {tensor.device}, wanted {wanted} as the others")


def check_slope(slope_H: Tensor, num_heads: int) -> None:
    """fp32 and contiguous [H]; that slopes are positive is the promise of `decay.slopes`."""
    check_tensors(slope=slope_H)
    if slope_H.shape != (num_heads,):
        raise ValueError(f"slope has shape {list(slope_H.shape)}, wanted [{num_heads}]: one a head")
    if slope_H.dtype != torch.float32:
        raise ValueError(f"slope is {slope_H.dtype}, wanted torch.float32: bf16 decays are wrong")
    if not slope_H.is_contiguous():
        raise ValueError(f"slope has stride {slope_H.stride(0)}, wanted 1")


def check_pool(pool_SHDD: Tensor, num_heads: int, head_dim: int) -> None:
    """fp32 [S, H, D, D]; each slot is contiguous, and slots lie any distance apart."""
    check_tensors(pool=pool_SHDD)
    sizes = [num_heads, head_dim, head_dim]
    if pool_SHDD.dim() != 4 or list(pool_SHDD.shape[1:]) != sizes:
        wanted = ", ".join(map(str, ["slots", *sizes]))
        raise ValueError(f"pool has shape {list(pool_SHDD.shape)}, wanted [{wanted}]")
    if pool_SHDD.dtype != torch.float32:
        raise ValueError(f"pool is {pool_SHDD.dtype}, wanted torch.float32")
    num_slots = pool_SHDD.shape[0]
    if num_slots == 0:
        return
    if not pool_SHDD[0].is_contiguous():
        raise ValueError(
            f"a slot of the pool has strides {list(pool_SHDD.stride()[1:])}, "
            f"wanted contiguous {[head_dim * head_dim, head_dim, 1]}"
        )
    slot_size = num_heads * head_dim * head_dim
    if num_slots > 1 and pool_SHDD.stride(0) < slot_size:
        raise ValueError(
            f"slots of the pool are {pool_SHDD.stride(0)} values apart, wanted at least {slot_size}"
        )


def check_rows(q_BTHD: Tensor, state_BHDD: Tensor | None) -> None:
    """Padded rows [B, T, H, D] of at least one token, and a state on their device."""
    check_tensors(q=q_BTHD)
    if q_BTHD.dim() != 4 or q_BTHD.shape[1] == 0:
        raise ValueError(
            f"q has shape {list(q_BTHD.shape)}, wanted [rows, tokens, heads, dim], a token or more"
        )
    if state_BHDD is not None:
        check_devices(q_BTHD.device, state=state_BHDD)


def check_states(state_NHDD: Tensor, count: int, num_heads: int, head_dim: int) -> None:
    """fp32 [N, H, D, D] of any strides."""
    wanted = [count, num_heads, head_dim, head_dim]
    if list(state_NHDD.shape) != wanted:
        raise ValueError(f"the initial state has shape {list(state_NHDD.shape)}, wanted {wanted}")
    if state_NHDD.dtype != torch.float32:
        raise ValueError(f"the initial state is {state_NHDD.dtype}, wanted torch.float32")


def check_decode(
    q_BHD: Tensor,
    k_BHD: Tensor,
    v_BHD: Tensor,
    slope_H: Tensor,
    pool_SHDD: Tensor,
    slot_B: Tensor,
    out_BHD: Tensor | None = None,
) -> None:
    """All of one decode step. Slots on a device are not read: only their number and dtype count."""
    check_qkv(q_BHD, k_BHD, v_BHD)
    B, H, D = q_BHD.shape
    if B > MAX_ROWS:
        raise ValueError(f"q has {B} rows, wanted at most {MAX_ROWS}: split the step")
    check_slope(slope_H, H)
    check_pool(pool_SHDD, H, D)
    check_tensors(slots=slot_B)
    check_index_tensor(slot_B, "slots")
    if not slot_B.is_contiguous():
        raise ValueError(f"slots have stride {slot_B.stride(0)}, wanted 1: pass .contiguous()")
    if slot_B.shape != (B,):
        raise ValueError(f"slots has shape {list(slot_B.shape)}, wanted [{B}]: one a row of q")
    check_devices(q_BHD.device, slope=slope_H, pool=pool_SHDD, slots=slot_B)
    if slot_B.device.type == "cpu":
        check_distinct(check_slots(slot_B, pool_SHDD))
    if out_BHD is not None:
        check_out(out_BHD, q_BHD, k_BHD, v_BHD)


def check_out(out_THD: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
    """A caller's output has q's shape, dtype and device, stride 1 along D, and its own memory."""
    check_tensors(out=out_THD)
    if out_THD.shape != q_THD.shape:
        raise ValueError(f"out has shape {list(out_THD.shape)}, wanted {list(q_THD.shape)} as q")
    check_last_dim(out_THD, "out")
    check_dtypes(q_THD.dtype, out=out_THD)
    check_devices(q_THD.device, out=out_THD)
    T, H, D = out_THD.shape
    if (H > 1 and out_THD.stride(1) < D) or (T > 1 and out_THD.stride(0) < D):
        raise ValueError(f"out has strides {list(out_THD.stride())}, wanted no value stored twice")
    first, last = _extent(out_THD)
    for name, tensor in {"q": q_THD, "k": k_THD, "v": v_THD}.items():
        start, end = _extent(tensor)
        if start < last and first < end:
            raise ValueError(f"out lies in the memory of {name}, wanted memory of its own")


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte and past the last, of strides that are not negative."""
    if not tensor.numel():
        return 0, 0
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def check_slots(slots: Sequence[int] | Tensor, pool_SHDD: Tensor, name: str = "slots") -> list[int]:
    """The slots as a list of ints: each below S, negative for "none". Reads host data only."""
    if isinstance(slots, Tensor):
        check_index_tensor(slots, name)
        if slots.device.type != "cpu":
            raise ValueError(f"{name} is on {slots.device}, wanted a list or a CPU tensor")
    numbers = _ints(slots, name)
    num_slots = pool_SHDD.shape[0]
    for place, slot in enumerate(numbers):
        if slot >= num_slots:
            raise ValueError(
                f"{name}[{place}] is {slot}, wanted below {num_slots} (the pool's), or -1 for none"
            )
    return numbers


def check_distinct(slots: Sequence[int]) -> None:
    """No slot is written twice by one call; negative ones are not written."""
    taken: dict[int, int] = {}
    for place, slot in enumerate(slots):
        if slot < 0:
            continue
        if slot in taken:
            raise ValueError(
                f"slots[{taken[slot]}] and slots[{place}] are both {slot}, wanted distinct slots: "
                "each is written once"
            )
        taken[slot] = place


def check_index_tensor(index_N: Tensor, name: str) -> None:
    if index_N.dim() != 1:
        raise ValueError(f"{name} has shape {list(index_N.shape)}, wanted one dim")
    if index_N.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is {index_N.dtype}, wanted torch.int32 or torch.int64")


def sequence_bounds(cu_seqlens: Sequence[int] | Tensor, num_tokens: int) -> list[int]:
    """The N + 1 bounds of N packed sequences: from 0, never falling, to `num_tokens`.

    A tensor on a device is copied to the host, which waits for that device.
    """
    if isinstance(cu_seqlens, Tensor):
        check_index_tensor(cu_seqlens, "cu_seqlens")
    bounds = _ints(cu_seqlens, "cu_seqlens")
    if not bounds or bounds[0] != 0:
        raise ValueError(f"cu_seqlens starts with {bounds[:1]}, wanted 0")
    for place in range(1, len(bounds)):
        if bounds[place] < bounds[place - 1]:
            raise ValueError(
                f"cu_seqlens[{place}] is {bounds[place]} after {bounds[place - 1]}, "
                "wanted bounds that never fall"
            )
    if bounds[-1] != num_tokens:
        raise ValueError(f"cu_seqlens ends at {bounds[-1]}, wanted {num_tokens}: the tokens of q")
    return bounds


def _ints(values: Sequence[int] | Tensor, name: str) -> list[int]:
    if not isinstance(values, Iterable):
        raise ValueError(f"{name} is a {type(values).__name__}, wanted a list of ints or a tensor")
    numbers: list[int] = []
    for place, number in enumerate(values.tolist() if isinstance(values, Tensor) else values):
        if isinstance(number, bool) or not hasattr(number, "__index__"):
            raise ValueError(f"{name}[{place}] is {number!r}, wanted an int")
        numbers.append(operator.index(number))
    return numbers
