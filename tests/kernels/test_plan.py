from __future__ import annotations

import pytest

from m1serve.kernels.decay import slopes
from m1serve.kernels.plan import (
    CHUNK,
    FOREVER,
    MIN_SEGMENT,
    NO_SLOT,
    Piece,
    Plan,
    Snapshot,
    make_plan,
    rounds,
)

D, SMS = 128, 132
# heads that never forget, and M1's first layer
SLOW_64, SLOW_8 = (FOREVER,) * 64, (FOREVER,) * 8
FAST_64 = tuple(int(17 / slope) + 1 for slope in slopes(64, 80, 0).tolist())


def covered(plan: Plan) -> list[int]:
    items = plan.whole + plan.segments
    return sorted(row for item in items for row in range(item.row, item.row + item.num_tokens))


def test_sequences_that_fill_the_machine_are_walked_whole() -> None:
    pieces = tuple(Piece(i * 8192, 8192, NO_SLOT, i) for i in range(8))
    assert make_plan(pieces, SLOW_64, D, SMS) == Plan(columns=128, whole=pieces)


def test_one_sequence_of_many_heads_is_halved_when_its_heads_forget() -> None:
    """Else finding the second half's start state costs more than programs of half the columns."""
    pieces = (Piece(0, 65_536, NO_SLOT, 0),)
    plan = make_plan(pieces, FAST_64, D, SMS)
    assert (len(plan.segments), plan.columns) == (2, 128)
    assert make_plan(pieces, SLOW_64, D, SMS) == Plan(columns=64, whole=pieces)


def test_few_heads_cut_a_long_sequence_into_one_wave_of_segments() -> None:
    plan = make_plan((Piece(10, 262_144 + 7, 5, 9),), SLOW_8, D, SMS)
    assert len(plan.segments) == 16
    assert covered(plan) == list(range(10, 10 + 262_144 + 7))
    assert all(item.num_tokens % CHUNK == 0 for item in plan.segments[:-1])
    assert [item.target for item in plan.segments] == [NO_SLOT] * 15 + [9]
    # the last segment's own state has no reader
    last = plan.segments[-1]
    assert all(run.row + run.num_tokens <= last.row for run in plan.runs)
    assert sum(run.num_tokens for run in plan.runs) == last.row - 10
    assert [run.start_of for run in plan.runs if run.start_of >= 0] == list(range(15))
    # each run knows how far it lies before the next segment
    ends = {item.row for item in plan.segments}
    assert all(run.row + run.num_tokens + run.ahead in ends for run in plan.runs)
    (chain,) = plan.chains
    assert (chain.first, chain.last, chain.source, chain.final) == (0, len(plan.runs), 5, 15)


def test_runs_reach_back_as_far_as_the_slowest_head_remembers() -> None:
    (piece,) = (Piece(0, 65_536, NO_SLOT, 0),)
    plan = make_plan((piece,), FAST_64, D, SMS)
    boundary = plan.segments[1].row
    assert boundary - plan.runs[0].row == pytest.approx(max(FAST_64), abs=CHUNK)
    assert plan.runs[-1].row + plan.runs[-1].num_tokens == boundary
    assert sum(run.fade for run in plan.runs) == boundary


def test_a_walk_backwards_cuts_from_the_end() -> None:
    plan = make_plan((Piece(0, 65_536 + 7, NO_SLOT, 2),), SLOW_8, D, SMS, reverse=True)
    assert covered(plan) == list(range(65_536 + 7))
    assert plan.segments[0].row + plan.segments[0].num_tokens == 65_536 + 7
    assert plan.segments[-1].row == 0
    assert plan.segments[-1].target == 2
    assert plan.runs[0].row + plan.runs[0].num_tokens == 65_536 + 7


def test_a_long_sequence_is_cut_beside_short_ones() -> None:
    pieces = (Piece(0, 100, 4, 4), *(Piece(100 + i, 1) for i in range(9)), Piece(109, 65_536, 1, 1))
    plan = make_plan(pieces, SLOW_8, D, SMS)
    assert (len(plan.whole), len(plan.segments)) == (10, 16)
    assert covered(plan) == list(range(109 + 65_536))
    # those walked whole start from the pool itself, the longest first
    assert plan.whole[0] == pieces[0]
    assert [chain.source for chain in plan.chains] == [1]


@pytest.mark.parametrize("num_tokens", [0, 1, 63, MIN_SEGMENT, 2 * MIN_SEGMENT - 1])
def test_what_is_short_stays_whole(num_tokens: int) -> None:
    pieces = (Piece(0, num_tokens, 0, 1),)
    plan = make_plan(pieces, (FOREVER,), D, SMS)
    assert plan.whole == pieces
    assert not plan.runs


def test_snapshots_end_one_piece_and_start_the_next() -> None:
    launches = rounds([0, 100, 150], [NO_SLOT, 7], [0, 1], [Snapshot(0, 90, 3), Snapshot(0, 30, 2)])
    assert launches == [
        (Piece(0, 30, NO_SLOT, 2), Piece(100, 50, 7, 1)),
        (Piece(30, 60, 2, 3),),
        (Piece(90, 10, 3, 0),),
    ]


def test_a_snapshot_after_the_last_token_leaves_an_empty_piece() -> None:
    launches = rounds([0, 5], [NO_SLOT], [1], [Snapshot(0, 5, 0)])
    assert launches == [(Piece(0, 5, NO_SLOT, 0),), (Piece(5, 0, 0, 1),)]
