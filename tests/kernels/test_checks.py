from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from m1serve.kernels.checks import (
    check_distinct,
    check_pool,
    check_qkv,
    check_slope,
    check_slots,
    sequence_bounds,
)

T, H, D, S = 5, 2, 32, 4
POOL = torch.zeros(S, H, D, D)


def qkv(**like: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.zeros(T, H, 3 * D, **like).split(D, -1)
    return q, k, v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_views_of_a_packed_projection_are_taken(dtype: torch.dtype) -> None:
    check_qkv(*qkv(dtype=dtype))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda q: q[0], "q has shape [2, 32], wanted [tokens, heads, dim]"),
        (lambda q: q[:, :, :31], "k has shape [5, 2, 32], wanted that of q, [5, 2, 31]"),
        (lambda q: q[:, 1:], "wanted that of q, [5, 1, 32]"),
        (lambda q: q.mT.contiguous().mT, "q has stride 2 along its last dim, wanted 1"),
        (lambda q: q.double(), "q is torch.float64, wanted one of"),
        (lambda q: q.half(), "k is torch.float32, wanted torch.float16"),
        (lambda q: q.to("meta"), "k is on cpu, wanted meta"),
    ],
)
def test_a_wrong_q_is_refused(spoil: object, said: str) -> None:
    assert callable(spoil)
    q, k, v = qkv()
    with pytest.raises(ValueError, match=re.escape(said)):
        check_qkv(spoil(q), k, v)


@pytest.mark.parametrize("shape", [(T, H, 16), (T, H, 256), (T, 0, D)])
def test_a_wrong_head_dim_or_no_head_is_refused(shape: tuple[int, ...]) -> None:
    q = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"head_dim is \d+, wanted one of|at least one head"):
        check_qkv(q, q, q)


@pytest.mark.parametrize(
    ("slope", "said"),
    [
        (torch.zeros(3), "slope has shape [3], wanted [2]"),
        (torch.zeros(2).bfloat16(), "slope is torch.bfloat16, wanted torch.float32"),
        (torch.zeros(4)[::2], "slope has stride 2, wanted 1"),
    ],
)
def test_a_wrong_slope_is_refused(slope: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        check_slope(slope, H)


@pytest.mark.parametrize(
    ("pool", "said"),
    [
        (torch.zeros(S, H, D), "pool has shape [4, 2, 32], wanted [slots, 2, 32, 32]"),
        (torch.zeros(S, H, D, 64), "pool has shape [4, 2, 32, 64]"),
        (POOL.bfloat16(), "pool is torch.bfloat16, wanted torch.float32"),
        (torch.zeros(S, H, D, D).mT, "a slot of the pool has strides [1024, 1, 32]"),
        (POOL[:1].expand(S, -1, -1, -1), "slots of the pool are 0 values apart"),
    ],
)
def test_a_wrong_pool_is_refused(pool: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        check_pool(pool, H, D)


def test_slots_may_lie_far_apart() -> None:
    check_pool(torch.zeros(S, 3, H, D, D)[:, 1], H, D)
    check_pool(POOL[:0], H, D)


def test_slots_come_back_as_a_list() -> None:
    assert check_slots([3, -1, 0, 0], POOL) == [3, -1, 0, 0]
    assert check_slots(torch.tensor([3, -1], dtype=torch.int32), POOL) == [3, -1]


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        ([0, 4], "slots[1] is 4, wanted below 4 (the pool's), or -1 for none"),
        ([0, 1.0], "slots[1] is 1.0, wanted an int"),
        (torch.zeros(2), "slots is torch.float32, wanted torch.int32 or torch.int64"),
        (torch.zeros(2, 1, dtype=torch.int64), "slots has shape [2, 1], wanted one dim"),
    ],
)
def test_wrong_slots_are_refused(slots: list[int] | Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        check_slots(slots, POOL)


def test_a_slot_written_twice_is_refused() -> None:
    check_distinct([2, -1, -1, 0])
    with pytest.raises(ValueError, match=re.escape("slots[0] and slots[2] are both 2")):
        check_distinct([2, -1, 2])


def test_bounds_come_back_as_a_list() -> None:
    assert sequence_bounds([0, 2, 2, 5], 5) == [0, 2, 2, 5]
    assert sequence_bounds(torch.tensor([0, 5], dtype=torch.int32), 5) == [0, 5]


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ([], "cu_seqlens starts with [], wanted 0"),
        ([1, 5], "cu_seqlens starts with [1], wanted 0"),
        ([0, 3, 2, 5], "cu_seqlens[2] is 2 after 3, wanted bounds that never fall"),
        ([0, 4], "cu_seqlens ends at 4, wanted 5"),
        ([0, 6], "cu_seqlens ends at 6, wanted 5"),
        ([0, True], "cu_seqlens[1] is True, wanted an int"),
        (torch.tensor([0.0, 5.0]), "cu_seqlens is torch.float32, wanted torch.int32"),
    ],
)
def test_wrong_bounds_are_refused(bounds: list[int] | Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        sequence_bounds(bounds, 5)
