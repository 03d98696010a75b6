"""States of training and of fixed buffers: what a copy shares, and what it does not."""

from __future__ import annotations

import torch
from torch import Tensor

from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.state import SequenceState


def token_ids(num_rows: int, num_tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 128, (num_rows, num_tokens), generator=generator)


def test_a_buffer_starts_at_zero_and_knows_its_size(model: M1ForCausalLM) -> None:
    state = SequenceState.allocate(model.config, 2, 10)
    tensors = [*state.lightning.values(), *state.keys.values(), *state.values.values()]
    assert all(t.count_nonzero() == 0 for t in tensors)
    assert state.num_bytes == 2 * (2 * 4 * 16 * 16 * 4 + 2 * 2 * 2 * 10 * 16 * 4)
    assert (state.num_rows, state.num_tokens, state.num_columns) == (2, 0, 10)


@torch.no_grad()
def test_selected_rows_are_copies_that_go_on_alone(model: M1ForCausalLM) -> None:
    state = SequenceState.allocate(model.config, 3, 48)
    model.hidden(token_ids(3, 20), state, torch.tensor([20, 11, 5]))
    kept = {i: t.clone() for i, t in state.lightning.items()}
    part = state.select(torch.tensor([2, 0]), columns=32)
    assert all(t.shape[2] == 32 for t in part.keys.values())
    model.hidden(token_ids(2, 6), part, torch.tensor([6, 3]))
    assert part.length_B.tolist() == [11, 23]
    assert state.length_B.tolist() == [20, 11, 5]
    assert all(torch.equal(t, kept[i]) for i, t in state.lightning.items())


@torch.no_grad()
def test_selected_rows_come_back_to_where_they_were(model: M1ForCausalLM) -> None:
    ids, rows = token_ids(3, 26), torch.tensor([2, 0])
    state = SequenceState.allocate(model.config, 3, 48)
    model.hidden(ids[:, :20], state, torch.tensor([20, 11, 5]))
    part = state.select(rows, columns=32)
    read = torch.stack([ids[2, 5:11], ids[0, 20:26]])
    model.hidden(read, part, torch.tensor([6, 3]))
    state.write(rows, part)
    assert state.length_B.tolist() == [23, 11, 11]
    hidden, _ = model.hidden(torch.stack([ids[0, 23], ids[1, 11], ids[2, 11]])[:, None], state)
    for row, length in enumerate((23, 11, 11)):
        wanted = model(ids[row : row + 1, : length + 1])[0, -1]
        assert (model.logits(hidden[row, 0]) - wanted).abs().max() < 2e-5


def test_a_fixed_copy_is_private(model: M1ForCausalLM) -> None:
    with torch.no_grad():
        _, state = model.hidden(token_ids(1, 10))
        fixed = state.expand(3).with_capacity(12)
        model.hidden(token_ids(3, 2), fixed)
    assert state.length_B.tolist() == [10]
    assert fixed.length_B.tolist() == [12, 12, 12]
    assert not torch.equal(fixed.lightning[0][0], fixed.lightning[0][1])
