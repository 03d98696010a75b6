"""Rows move, grow and are handed on, and every sequence keeps what is its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.engine.generation import Generation, Sequence
from m1serve.engine.outbox import Outbox, Outlet
from m1serve.engine.pages import PageAllocator
from m1serve.engine.rows import RowTable
from m1serve.engine.slots import SlotPool
from m1serve.engine.stopping import StopRules
from m1serve.engine.token_ids import TokenIds
from m1serve.model.paged import KeyPages
from m1serve.model.tiny import tiny_config
from m1serve.types import GenerateRequest, Limits

SMALL = replace(tiny_config(64), num_hidden_layers=2, attn_type_list=(0, 1))


PAGE_TOKENS = 4


def pool(num_rows: int = 12, num_pages: int = 64) -> SlotPool:
    pages = KeyPages.allocate(SMALL, num_pages, PAGE_TOKENS)
    allocator = PageAllocator(num_pages, page_tokens=PAGE_TOKENS)
    return SlotPool(SMALL, num_rows=num_rows, max_tokens=20, pages=pages, allocator=allocator)


def sequence(tok: ChatTokenizer, number: int, num_tokens: int = 2) -> Sequence:
    prompt = TokenIds.of(range(1, num_tokens + 1))
    request = GenerateRequest(
        id=str(number), prompt_ids=tuple(prompt.array.tolist()), limits=Limits(max_tokens=5)
    )
    outlet = Outlet(Outbox(), cast(asyncio.AbstractEventLoop, None), cast(asyncio.Queue, None))
    generation = Generation(request=request, prompt=prompt, outlet=outlet, order=number)
    rules = StopRules(request, tokenizer=tok, max_model_len=100)
    return Sequence(
        generation=generation, choice=0, rules=rules, budget=None, rng=None, unread=prompt
    )


def keys_of(table: RowTable, row: int, num_tokens: int) -> Tensor:
    """[K, L, D] of a row, through its page table."""
    state = table.pool.state
    t_MKSD = state.pages.keys[1][state.page_BM[row].long()]
    return t_MKSD.transpose(0, 1).flatten(1, 2)[:, :num_tokens]


def sign(table: RowTable, row: int, number: int, num_tokens: int = 6) -> None:
    """Writes a number all over a row."""
    state = table.pool.state
    assert table.pool.reserve(row, num_tokens)
    state.lightning[0][row] = float(number)
    for place in range(num_tokens):
        page = state.page_BM[row, place // PAGE_TOKENS]
        state.pages.keys[1][page, :, place % PAGE_TOKENS] = float(number)
    state.length_B[row] = num_tokens
    table.pool.last_RE[row] = float(number)


def assert_signed(table: RowTable, sequence: Sequence, num_tokens: int = 6) -> None:
    number, state = float(sequence.request.id), table.pool.state
    row = sequence.row
    assert state.length_B[row] == num_tokens
    own = (state.lightning[0][row], keys_of(table, row, num_tokens), table.pool.last_RE[row])
    for t in own:
        assert bool((t == number).all()), f"row {row} should be {number}: {t.flatten()[:4]}"


@given(steps=st.lists(st.tuples(st.sampled_from("ofpr"), st.integers(0, 99)), max_size=40))
@settings(max_examples=40, deadline=None)
def test_whatever_happens_to_rows_each_sequence_keeps_its_state(
    tok: ChatTokenizer, steps: list[tuple[str, int]]
) -> None:
    table = RowTable(pool())
    for number, (what, pick) in enumerate(steps, start=1):
        everyone = [*table.decoding, *table.reading]
        if what == "o" and len(table) < 12:
            opened = sequence(tok, number)
            assert table.open(opened, snapshot=None)
            assert table.pool.state.length_B[opened.row] == 0
            assert not table.pool.state.lightning[0][opened.row].any()
            sign(table, opened.row, number)
        elif what == "f" and everyone and len(table) < 12:
            parent = everyone[pick % len(everyone)]
            forked = sequence(tok, int(parent.request.id))
            snapshot = table.pool.snapshot(parent.row, 6)
            assert table.fork(forked, snapshot)
            snapshot.release()
        elif what == "p" and table.reading:
            table.promote(table.reading[pick % len(table.reading)])
        elif what == "r" and everyone:
            gone = everyone[pick % len(everyone)]
            table.release(gone)
            assert gone not in table
        assert [s.row for s in table.decoding] == list(range(len(table.decoding)))
        rows = [s.row for s in (*table.decoding, *table.reading)]
        assert len(set(rows)) == len(rows)
        for each in (*table.decoding, *table.reading):
            assert each in table
            assert_signed(table, each)


def test_all_pages_come_back(tok: ChatTokenizer) -> None:
    table = RowTable(pool(num_pages=9))
    allocator = table.pool._allocator
    first, second = sequence(tok, 1, 10), sequence(tok, 2, 5)
    assert table.open(first, snapshot=None)
    assert table.open(second, snapshot=None)
    assert allocator.num_free == 9 - 3 - 2
    table.promote(second)
    snapshot = table.pool.snapshot(second.row, 5)
    forked = sequence(tok, 3, 5)
    assert table.fork(forked, snapshot)
    # its first page is shared, the one it will write to is its own
    assert allocator.num_free == 9 - 3 - 2 - 1
    for each in (first, second, forked):
        table.release(each)
    assert allocator.num_free == 9 - 2
    snapshot.release()
    assert allocator.num_free == 9


def test_who_finds_no_pages_gets_no_row_and_leaves_none_taken(tok: ChatTokenizer) -> None:
    table = RowTable(pool(num_pages=4))
    first = sequence(tok, 1, 10)
    assert table.open(first, snapshot=None)
    assert not table.open(sequence(tok, 2, 5), snapshot=None)
    assert (len(table), table.pool._allocator.num_free) == (1, 1)
    snapshot = table.pool.snapshot(first.row, 10)
    assert table.fork(sequence(tok, 3, 10), snapshot)
    assert not table.fork(sequence(tok, 4, 10), snapshot)
    assert len(table) == 2
    assert not table.pool.reserve(first.row, 13)
    assert table.pool.reserve(first.row, 12)


def test_a_row_restored_within_a_page_leaves_the_snapshot_alone(tok: ChatTokenizer) -> None:
    table = RowTable(pool())
    owner, other = sequence(tok, 1, 6), sequence(tok, 2, 8)
    assert table.open(owner, snapshot=None)
    sign(table, owner.row, 1)
    snapshot = table.pool.snapshot(owner.row, 6)
    assert table.open(other, snapshot=snapshot)
    assert other.num_cached == 6
    assert (keys_of(table, other.row, 6) == 1).all()
    table.pool.state.pages.keys[1][table.pool.state.page_BM[other.row, 1], :, 2:] = 2.0
    table.pool.state.pages.keys[1][table.pool.state.page_BM[owner.row, 1], :, 2:] = 3.0
    assert (keys_of(table, owner.row, 8)[:, 6:] == 3).all()
    assert (keys_of(table, other.row, 8)[:, 6:] == 2).all()
    third = sequence(tok, 1, 7)
    assert table.open(third, snapshot=snapshot)
    assert_signed(table, third)


class Failing(KeyPages):
    """Finds no memory for the copy of a page."""

    def copy_page(self, source: int, target: int) -> None:
        raise MemoryError(f"no copy of {source}")


def test_a_copy_that_fails_leaves_no_page_taken(tok: ChatTokenizer) -> None:
    table = RowTable(pool())
    first, allocator = sequence(tok, 1, 10), table.pool._allocator
    assert table.open(first, snapshot=None)
    snapshot = table.pool.snapshot(first.row, 10)
    pages = table.pool._pages
    table.pool._pages = Failing(keys=pages.keys, values=pages.values)
    num_free = allocator.num_free
    for place in (
        lambda: table.fork(sequence(tok, 2, 10), snapshot),
        lambda: table.open(sequence(tok, 3, 12), snapshot=snapshot),
    ):
        with pytest.raises(MemoryError):
            place()
        assert (allocator.num_free, len(table), snapshot.num_holders) == (num_free, 1, 1)
