"""Rows whose keys lie in pages go on as one whole forward would."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.paged import KeyPages, PagedState, Span

S = 16
NUM_PAGES = 24


def token_ids(num_rows: int, num_tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 128, (num_rows, num_tokens), generator=generator)


def gap(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def paged(model: M1ForCausalLM, num_rows: int, *, seed: int = 0) -> PagedState:
    """Rows with pages all over the pool; every page is full of NaN."""
    config, H, D = model.config, model.config.num_attention_heads, model.config.head_dim
    pages = KeyPages.allocate(config, NUM_PAGES, S)
    for t in (*pages.keys.values(), *pages.values.values()):
        t.fill_(torch.nan)
    order = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(seed))
    each = NUM_PAGES // num_rows
    return PagedState(
        lightning={i: torch.zeros(num_rows, H, D, D) for i in config.lightning_layers},
        keys={},
        values={},
        length_B=torch.zeros(num_rows, dtype=torch.int64),
        fixed_capacity=True,
        pages=pages,
        page_BM=order[: num_rows * each].view(num_rows, each).to(torch.int32),
    )


def read(model: M1ForCausalLM, state: PagedState, ids: Tensor, counts: list[int]) -> Tensor:
    """One forward of so many tokens a row."""
    starts = state.length_B.tolist()
    state.spans = tuple(Span(start=s, num_tokens=n) for s, n in zip(starts, counts, strict=True))
    hidden, _ = model.hidden(ids, state, torch.tensor(counts))
    return hidden


@pytest.mark.parametrize("cuts", [(), (1,), (15, 16, 17), (32, 33), (1, 2, 3, 40)])
@torch.no_grad()
def test_any_split_gives_the_same_logits(model: M1ForCausalLM, cuts: tuple[int, ...]) -> None:
    ids, state = token_ids(2, 60), paged(model, 2)
    outputs = []
    for start, end in zip((0, *cuts), (*cuts, 60), strict=True):
        outputs.append(read(model, state, ids[:, start:end], [end - start] * 2))
    assert gap(model.logits(torch.cat(outputs, 1)), model(ids)) < 2e-5
    assert state.length_B.tolist() == [60, 60]


@torch.no_grad()
def test_token_by_token_equals_the_whole_forward(model: M1ForCausalLM) -> None:
    ids, state = token_ids(3, 40), paged(model, 3)
    outputs = [model.hidden(ids[:, t : t + 1], state)[0] for t in range(40)]
    assert gap(model.logits(torch.cat(outputs, 1)), model(ids)) < 2e-5


@torch.no_grad()
def test_rows_of_different_lengths_read_and_decode_together(model: M1ForCausalLM) -> None:
    ids, state = token_ids(3, 50), paged(model, 3)
    first, second = [9, 30, 16], [20, 1, 3]
    hidden = read(model, state, ids[:, :30], first)
    for row, num in enumerate(first):
        assert gap(model.logits(hidden[row, :num]), model(ids[row : row + 1, :num])[0]) < 2e-5
    ragged = torch.zeros(3, 20, dtype=torch.int64)
    for row, (num, more) in enumerate(zip(first, second, strict=True)):
        ragged[row, :more] = ids[row, num : num + more]
    read(model, state, ragged, second)
    ends = [a + b for a, b in zip(first, second, strict=True)]
    last = torch.stack([ids[row, end] for row, end in enumerate(ends)])
    decoded = model.logits(model.hidden(last[:, None], state)[0])[:, 0]
    for row, end in enumerate(ends):
        assert gap(decoded[row], model(ids[row : row + 1, : end + 1])[0, -1]) < 2e-5


@torch.no_grad()
def test_an_idle_row_keeps_what_it_holds_in_a_decode_step(model: M1ForCausalLM) -> None:
    ids, state = token_ids(2, 48), paged(model, 2, seed=3)
    read(model, state, ids, [48, 48])
    kept = {i: t[1].clone() for i, t in state.lightning.items()}
    pages = state.page_BM[1].long()
    keys = {i: t[pages].clone() for i, t in state.pages.keys.items()}
    model.hidden(ids[:, :1], state, torch.tensor([1, 0]))
    assert state.length_B.tolist() == [49, 48]
    assert all(torch.equal(t[1], kept[i]) for i, t in state.lightning.items())
    for i, t in state.pages.keys.items():
        assert torch.equal(t[pages].nan_to_num(7.0), keys[i].nan_to_num(7.0))


@torch.no_grad()
def test_a_row_that_fills_its_last_page_may_idle(model: M1ForCausalLM) -> None:
    state = paged(model, 3)
    read(model, state, token_ids(3, 128), [128, 128, 10])
    hidden, _ = model.hidden(token_ids(3, 1), state, torch.tensor([0, 0, 1]))
    assert hidden[2].isfinite().all()
    assert state.length_B.tolist() == [128, 128, 11]


@torch.no_grad()
def test_one_page_is_copied_whole(model: M1ForCausalLM) -> None:
    state = paged(model, 1)
    read(model, state, token_ids(1, 5), [5])
    source, target = int(state.page_BM[0, 0]), int(state.page_BM[0, 5])
    state.pages.copy_page(source, target)
    for group in (state.pages.keys, state.pages.values):
        for t in group.values():
            assert torch.equal(t[source, :, :5], t[target, :, :5])
