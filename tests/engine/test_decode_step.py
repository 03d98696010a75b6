"""The masked step that a CUDA graph captures does what the plain one does, for its rows alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from m1serve.config import EngineSettings
from m1serve.engine.cache_memory import CacheMemory
from m1serve.engine.decode_step import DecodeStep, graph_rows
from m1serve.engine.pages import PageAllocator
from m1serve.engine.slots import SlotPool
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.paged import KeyPages, Span
from m1serve.model.weights import load_version
from m1serve.types import VersionRef


@pytest.fixture
def model(versions: tuple[VersionRef, VersionRef]) -> M1ForCausalLM:
    return load_version(Path(versions[0].path))[0].requires_grad_(False)


def filled_pool(model: M1ForCausalLM, lengths: list[int]) -> SlotPool:
    """A row for each length, all of them read."""
    pages = KeyPages.allocate(model.config, 32, 16)
    allocator = PageAllocator(32, page_tokens=16)
    pool = SlotPool(
        model.config, num_rows=len(lengths), max_tokens=128, pages=pages, allocator=allocator
    )
    for row, length in enumerate(lengths):
        assert pool.reserve(row, length + 4)
        part = pool.select_rows(torch.tensor([row]), (Span(start=0, num_tokens=length),))
        hidden, _ = model.hidden(torch.arange(10, 10 + length)[None], part)
        pool.put(torch.tensor([row]), part)
        pool.last_RE[row] = hidden[0, -1]
    return pool


@pytest.mark.parametrize(
    ("num_rows", "wanted"), [(1, 1), (8, 8), (9, 12), (32, 32), (33, 40), (128, 128), (129, 160)]
)
def test_a_graph_has_few_idle_rows(num_rows: int, wanted: int) -> None:
    assert graph_rows(num_rows, 512) == wanted
    assert graph_rows(num_rows, num_rows) == num_rows


@torch.inference_mode()
def test_rows_that_are_not_at_work_stay_as_they_are(model: M1ForCausalLM) -> None:
    lengths = [20, 33, 16, 5]
    plain, masked = filled_pool(model, lengths), filled_pool(model, lengths)
    tokens = torch.tensor([40, 50])
    DecodeStep(model, plain, with_graphs=False).run(tokens)
    step = DecodeStep(model, masked, with_graphs=False)
    before = {i: t[2:].clone() for i, t in masked.state.lightning.items()}
    last = masked.last_RE[2:].clone()
    # as before a capture: nobody is at work
    step._masked_step(4)
    assert masked.state.length_B.tolist() == lengths
    step._token_R[:2] = tokens
    step._count_R[:2] = 1
    step._masked_step(4)
    assert masked.state.length_B.tolist() == [21, 34, 16, 5]
    assert torch.allclose(masked.last_RE[:2], plain.last_RE[:2], atol=2e-5)
    assert torch.equal(masked.last_RE[2:], last)
    assert all(torch.equal(t[2:], before[i]) for i, t in masked.state.lightning.items())
    for i, t in masked.state.lightning.items():
        assert torch.allclose(t[:2], plain.state.lightning[i][:2], atol=2e-5)


def test_hidden_states_are_kept_in_the_heads_dtype(model: M1ForCausalLM) -> None:
    """In another, each step's logits would need a copy of the whole head."""
    memory = CacheMemory(model.bfloat16(), EngineSettings(num_slots=2, max_model_len=64))
    assert memory.new_pool().last_RE.dtype == torch.bfloat16
