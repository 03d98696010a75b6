"""Rows move, grow and are handed on, and every sequence keeps what is its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.engine.generation import Generation, Sequence
from m1serve.engine.outbox import Outbox, Outlet
from m1serve.engine.rows import RowTable
from m1serve.engine.slots import FIRST_ROWS, FIRST_TOKENS, SlotPool
from m1serve.engine.stopping import StopRules
from m1serve.model.tiny import tiny_config
from m1serve.types import GenerateRequest, Limits

SMALL = replace(tiny_config(64), num_hidden_layers=2, attn_type_list=(0, 1))


def pool(max_rows: int = 12, max_tokens: int = 600) -> SlotPool:
    import torch

    return SlotPool(
        SMALL, max_rows=max_rows, max_tokens=max_tokens, device="cpu", dtype=torch.float32
    )


def sequence(tok: ChatTokenizer, number: int) -> Sequence:
    request = GenerateRequest(id=str(number), prompt_ids=(1, 2), limits=Limits(max_tokens=5))
    outlet = Outlet(Outbox(), cast(asyncio.AbstractEventLoop, None), cast(asyncio.Queue, None))
    generation = Generation(request=request, outlet=outlet, order=number)
    rules = StopRules(request, tokenizer=tok, max_model_len=100)
    return Sequence(
        generation=generation, choice=0, rules=rules, budget=None, rng=None, unread=(1, 2)
    )


def sign(table: RowTable, row: int, number: int) -> None:
    """Writes a number all over a row."""
    state = table.pool.state
    state.lightning[0][row] = float(number)
    state.keys[1][row, :, :3] = float(number)
    state.values[1][row, :, :3] = float(number)
    state.length_B[row] = 3
    table.pool.last_RE[row] = float(number)


def assert_signed(table: RowTable, sequence: Sequence) -> None:
    number, state = float(sequence.request.id), table.pool.state
    row = sequence.row
    assert state.length_B[row] == 3
    for t in (state.lightning[0][row], state.keys[1][row, :, :3], table.pool.last_RE[row]):
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
            table.open(opened, num_cached=0, snapshot=None)
            assert table.pool.state.length_B[opened.row] == 0
            assert not table.pool.state.lightning[0][opened.row].any()
            sign(table, opened.row, number)
        elif what == "f" and everyone and len(table) < 12:
            parent = everyone[pick % len(everyone)]
            forked = sequence(tok, int(parent.request.id))
            table.fork(forked, table.pool.snapshot(parent.row))
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


def test_the_pool_begins_small_and_doubles_up_to_its_limits() -> None:
    slots = pool(max_rows=12, max_tokens=600)
    assert (slots.num_rows, slots.num_tokens) == (FIRST_ROWS, FIRST_TOKENS)
    slots.ensure(rows=9, tokens=10)
    assert (slots.num_rows, slots.num_tokens) == (12, FIRST_TOKENS)
    slots.ensure(rows=1, tokens=FIRST_TOKENS + 1)
    assert (slots.num_rows, slots.num_tokens) == (12, 2 * FIRST_TOKENS)
    slots.ensure(rows=1, tokens=600)
    assert slots.num_tokens == 600
    with pytest.raises(AssertionError):
        slots.ensure(rows=13, tokens=1)


def test_growing_keeps_what_rows_hold(tok: ChatTokenizer) -> None:
    table = RowTable(pool())
    members = [sequence(tok, number) for number in range(1, 5)]
    for member in members:
        table.open(member, num_cached=0, snapshot=None)
        sign(table, member.row, int(member.request.id))
    before = table.pool.num_bytes
    table.pool.ensure(rows=12, tokens=600)
    assert table.pool.num_bytes > before
    for member in members:
        assert_signed(table, member)
