"""Pool operations: a moved, snapshot or restored row continues as if nothing had happened."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.state import SequenceState

CAPACITY = 48


def token_ids(num_rows: int, num_tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 128, (num_rows, num_tokens), generator=generator)


@pytest.fixture
def pool(model: M1ForCausalLM) -> SequenceState:
    """Rows 0, 1 and 2 hold 20, 11 and 5 tokens, row 3 nothing."""
    pool = SequenceState.allocate(model.config, 4, CAPACITY)
    with torch.no_grad():
        model.hidden(token_ids(4, 20), pool, torch.tensor([20, 11, 5, 0]))
    return pool


@torch.no_grad()
def continuation(model: M1ForCausalLM, pool: SequenceState, row: int) -> Tensor:
    """Of a copy: the pool stays as it is."""
    part = pool.select(torch.tensor([row]))
    hidden = [model.hidden(token_ids(1, 1, seed=t), part)[0] for t in range(3)]
    return torch.cat([*hidden, model.hidden(token_ids(1, 9), part)[0]], 1)


def test_a_pool_starts_at_zero_and_knows_its_size(model: M1ForCausalLM) -> None:
    pool = SequenceState.allocate(model.config, 2, 10)
    tensors = [*pool.lightning.values(), *pool.keys.values(), *pool.values.values()]
    assert all(t.count_nonzero() == 0 for t in tensors)
    assert pool.num_bytes == 2 * (2 * 4 * 16 * 16 * 4 + 2 * 2 * 2 * 10 * 16 * 4)
    assert (pool.num_rows, pool.num_tokens, pool.num_columns) == (2, 0, 10)


def test_a_view_shares_memory_and_leaves_other_rows_alone(
    model: M1ForCausalLM, pool: SequenceState
) -> None:
    wanted = continuation(model, pool, 2)
    with torch.no_grad():
        model.hidden(token_ids(2, 1), pool.view(2))
        model.hidden(token_ids(1, 4), pool.view(1, start=3))
    assert pool.length_B.tolist() == [21, 12, 5, 4]
    assert torch.equal(continuation(model, pool, 2), wanted)


def test_a_moved_row_continues_identically(model: M1ForCausalLM, pool: SequenceState) -> None:
    wanted = continuation(model, pool, 0)
    pool.move_row(0, 2)
    assert pool.length_B.tolist() == [20, 11, 20, 0]
    assert torch.equal(continuation(model, pool, 2), wanted)


def test_a_zeroed_row_is_a_fresh_one(model: M1ForCausalLM, pool: SequenceState) -> None:
    wanted = continuation(model, pool, 3)
    pool.zero_row(0)
    assert torch.equal(continuation(model, pool, 0), wanted)
    assert all(t[0].count_nonzero() == 0 for t in (*pool.keys.values(), *pool.lightning.values()))


def test_a_zeroed_row_forgets_even_poison(model: M1ForCausalLM, pool: SequenceState) -> None:
    for t in (*pool.lightning.values(), *pool.keys.values(), *pool.values.values()):
        t[0, :, :20] = torch.nan
    pool.zero_row(0)
    assert continuation(model, pool, 0).isfinite().all()


def test_a_snapshot_restores_any_row_of_any_pool(model: M1ForCausalLM, pool: SequenceState) -> None:
    wanted = continuation(model, pool, 1)
    snapshot = pool.snapshot(1)
    assert all(t.shape[2] == 11 for t in snapshot.keys.values())
    with torch.no_grad():
        model.hidden(token_ids(4, 7), pool)
    pool.restore(0, snapshot)
    assert torch.equal(continuation(model, pool, 0), wanted)
    other = SequenceState.allocate(model.config, 1, 30)
    other.restore(0, snapshot)
    assert torch.equal(continuation(model, other, 0), wanted)


def test_a_snapshot_keeps_nothing_but_its_tokens(pool: SequenceState) -> None:
    short, long = pool.snapshot(2), pool.snapshot(0)
    assert long.num_bytes - short.num_bytes == 2 * 2 * 2 * (20 - 5) * 16 * 4
    storages = sum(t.untyped_storage().nbytes() for t in short.keys.values())
    assert storages == sum(t.numel() * 4 for t in short.keys.values())


def test_a_snapshot_continues_as_a_growing_state(model: M1ForCausalLM, pool: SequenceState) -> None:
    wanted = continuation(model, pool, 1)
    state = pool.snapshot(1)
    with torch.no_grad():
        hidden = [model.hidden(token_ids(1, 1), state)[0]]
    assert torch.allclose(hidden[0], wanted[:, :1], atol=2e-6)


def test_select_work_and_write_back_equals_working_in_the_pool(
    model: M1ForCausalLM, pool: SequenceState
) -> None:
    rows, ids, counts = torch.tensor([2, 0]), token_ids(2, 6), torch.tensor([6, 3])
    part = pool.select(rows, columns=32)
    assert all(t.shape[2] == 32 for t in part.keys.values())
    with torch.no_grad():
        model.hidden(ids, part, counts)
        for place, row in enumerate(rows.tolist()):
            model.hidden(ids[place, None, : counts[place]], pool.view(1, start=row))
    wanted = [continuation(model, pool, row) for row in range(4)]
    pool.write(rows, part)
    assert pool.length_B.tolist() == [23, 11, 11, 0]
    for row in range(4):
        assert torch.allclose(continuation(model, pool, row), wanted[row], atol=2e-5)


def test_a_fixed_copy_is_private(model: M1ForCausalLM) -> None:
    with torch.no_grad():
        _, state = model.hidden(token_ids(1, 10))
        fixed = state.expand(3).with_capacity(12)
        model.hidden(token_ids(3, 2), fixed)
    assert state.length_B.tolist() == [10]
    assert fixed.length_B.tolist() == [12, 12, 12]
    assert not torch.equal(fixed.lightning[0][0], fixed.lightning[0][1])
