"""Any plan of any batch, in numbers: every token once, every segment from its exact state."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m1serve.kernels import plan as planning
from m1serve.kernels.plan import CHUNK, FOREVER, NO_SLOT, Piece, Plan, make_plan

LENGTHS = st.sampled_from([0, 1, 63, 64, 65, 200, 1000, 3000])
WINDOWS = st.lists(st.sampled_from([1, 5, 63, 64, 65, 300, 2000, FOREVER]), min_size=1, max_size=4)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Piece, ...]:
    """Pieces with gaps between them, some from a state and some to a slot."""
    pieces, row = [], draw(st.sampled_from([0, 13]))
    for n, length in enumerate(draw(st.lists(LENGTHS, min_size=1, max_size=6))):
        source = draw(st.sampled_from([NO_SLOT, n]))
        pieces.append(Piece(row, length, source, draw(st.sampled_from([NO_SLOT, 100 + n]))))
        row += length + draw(st.sampled_from([0, 5]))
    return tuple(pieces)


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else only batches too long to follow token by token would be cut."""
    monkeypatch.setattr(planning, "MIN_SEGMENT", 2 * CHUNK)
    monkeypatch.setattr(planning, "MIN_RUN", CHUNK)
    monkeypatch.setattr(planning, "FIRST_PASS_BYTES", 0)


@settings(max_examples=60, deadline=None)
@given(
    pieces=batches(),
    windows=WINDOWS,
    head_dim=st.sampled_from([32, 64, 128]),
    num_sms=st.sampled_from([1, 8, 20, 132]),
    reverse=st.booleans(),
)
def test_a_plan_reaches_every_token_once_from_its_exact_state(
    pieces: tuple[Piece, ...], windows: list[int], head_dim: int, num_sms: int, reverse: bool
) -> None:
    plan = make_plan(pieces, tuple(windows), head_dim, num_sms, reverse=reverse)
    items = plan.whole + plan.segments
    rows = [row for item in items for row in range(item.row, item.row + item.num_tokens)]
    assert sorted(rows) == [r for p in pieces for r in range(p.row, p.row + p.num_tokens)]
    targets = [[item.target for item in some if item.target >= 0] for some in (items, pieces)]
    assert sorted(targets[0]) == sorted(targets[1])
    assert set(plan.whole) <= set(pieces)
    for window in windows:
        slope = 17.0 / window if window < FOREVER else 1e-7
        starts = start_states(plan, window, slope, reverse)
        for piece in pieces:
            follow(piece, plan, starts, slope, reverse)


def value(row: int) -> float:
    """What a token adds to a state that is one number."""
    return math.sin(row * 1.7) + 0.3


def source_state(slot: int) -> float:
    return 0.0 if slot == NO_SLOT else 1.7 + slot


def walked(row: int, num_tokens: int, reverse: bool) -> list[int]:
    rows = list(range(row, row + num_tokens))
    return rows[::-1] if reverse else rows


def start_states(plan: Plan, window: int, slope: float, reverse: bool) -> dict[int, float]:
    """As the first pass finds them: runs by themselves, then chains."""
    starts: dict[int, float] = {}
    for chain in plan.chains:
        state = source_state(chain.source)
        for run in plan.runs[chain.first : chain.last]:
            assert run.num_tokens % CHUNK == 0
            if run.start_of >= 0:
                starts[run.start_of] = state
            local, kept = 0.0, max(window - run.ahead, 0)
            skipped = max(run.num_tokens - kept, 0) // CHUNK * CHUNK
            for row in walked(run.row, run.num_tokens, reverse)[skipped:] if kept else []:
                local = local * math.exp(-slope) + value(row)
            state = state * math.exp(-slope * run.fade) + local
        starts[chain.final] = state
    return starts


def follow(piece: Piece, plan: Plan, starts: dict[int, float], slope: float, reverse: bool) -> None:
    inside = [
        (index, item)
        for index, item in enumerate(plan.segments)
        if piece.row <= item.row and item.row + item.num_tokens <= piece.row + piece.num_tokens
    ]
    state = source_state(piece.source)
    for index, item in sorted(inside, key=lambda pair: pair[1].row, reverse=reverse):
        assert item.source == index
        assert starts[index] == pytest.approx(state, rel=1e-5, abs=1e-5)
        for row in walked(item.row, item.num_tokens, reverse):
            state = state * math.exp(-slope) + value(row)
