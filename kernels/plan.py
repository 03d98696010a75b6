"""How a packed batch is cut into work for the walk: pure Python, numbers in, numbers out.

A piece is a run of tokens of one sequence that starts from one state and ends in another. Few
pieces times heads leave most of a GPU idle; then a piece is cut into segments, and the states at
their starts come from a first pass over keys and values (`kernels.walk`). README.md says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

CHUNK = 64
MIN_SEGMENT = 16 * CHUNK
# a local state costs its bytes twice, so a run of tokens must outweigh it
MIN_RUN = 8 * CHUNK
# value columns of one program of the walk
HALF = 64
RUN_PROGRAMS_PER_SM = 2

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Keep the state of `sequence` after its first `num_tokens` tokens of this call in `slot`."""

    sequence: int
    num_tokens: int
    slot: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [row, row + num_tokens), from the state in slot `source` to slot `target`."""

    row: int
    num_tokens: int
    source: int = NO_SLOT
    target: int = NO_SLOT


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens whose own contribution to the state is summed in the first pass."""

    row: int
    num_tokens: int
    start_of: int
    """The segment that starts where this run does, or NO_SLOT: its start state is then kept."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Runs [first, last) of one piece in walking order; then segment `final` starts."""

    first: int
    last: int
    source: int
    final: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Items of the walk; with chains, an item's source is its index among the start states."""

    items: tuple[Piece, ...]
    runs: tuple[Run, ...] = ()
    chains: tuple[Chain, ...] = ()


def rounds(
    bounds: Sequence[int],
    initial_slots: Sequence[int],
    final_slots: Sequence[int],
    snapshots: Sequence[Snapshot] = (),
) -> list[tuple[Piece, ...]]:
    """Pieces in launches that follow each other: a sequence with n snapshots takes up to n + 1.

    `bounds` are cumulative token counts, N + 1 of them. A snapshot is the end of one piece and the
    start of the next; nothing else in the kernels knows about it.
    """
    launches: list[list[Piece]] = []
    for n, (begin, end) in enumerate(pairwise(bounds)):
        row, source = begin, initial_slots[n]
        marks = sorted((s for s in snapshots if s.sequence == n), key=lambda s: s.num_tokens)
        stops = [(begin + s.num_tokens, s.slot) for s in marks]
        for depth, (stop, slot) in enumerate([*stops, (end, final_slots[n])]):
            if depth == len(launches):
                launches.append([])
            launches[depth].append(Piece(row, stop - row, source, slot))
            row, source = stop, slot
    return [tuple(pieces) for pieces in launches]


@lru_cache(maxsize=256)
def make_plan(
    pieces: tuple[Piece, ...], num_heads: int, head_dim: int, num_sms: int, *, reverse: bool = False
) -> Plan:
    """Pieces as they are where they fill the machine, else cut into near-equal segments."""
    wanted = num_sms // (num_heads * max(1, head_dim // HALF))
    total = sum(piece.num_tokens for piece in pieces)
    shares = [_num_segments(piece, total, wanted) for piece in pieces]
    if max(shares, default=1) == 1:
        return Plan(items=pieces)
    # of segments with a successor: the last ones' own states have no reader
    num_read = sum(shares) - len(shares)
    runs_each = max(1, RUN_PROGRAMS_PER_SM * num_sms // (num_heads * num_read))
    items: list[Piece] = []
    runs: list[Run] = []
    chains: list[Chain] = []
    for piece, share in zip(pieces, shares, strict=True):
        if share == 1 and piece.source == NO_SLOT:
            items.append(piece)
            continue
        first_run = len(runs)
        for start, count in _spans(_cut(piece.num_tokens, share, MIN_SEGMENT)):
            is_last = start + count == piece.num_tokens
            target = piece.target if is_last else NO_SLOT
            index = len(items)
            items.append(Piece(_row(piece, start, count, reverse), count, index, target))
            if not is_last:
                runs += _runs(piece, start, count, index, runs_each, reverse)
        chains.append(Chain(first_run, len(runs), piece.source, len(items) - 1))
    return Plan(items=tuple(items), runs=tuple(runs), chains=tuple(chains))


def _runs(
    piece: Piece, start: int, count: int, segment: int, parts: int, reverse: bool
) -> list[Run]:
    return [
        Run(
            _row(piece, start + begin, tokens, reverse),
            tokens,
            NO_SLOT if begin else segment,
        )
        for begin, tokens in _spans(_cut(count, parts, MIN_RUN))
    ]


def _spans(lengths: list[int]) -> list[tuple[int, int]]:
    """(start, length) of consecutive lengths."""
    return list(zip(accumulate(lengths, initial=0), lengths, strict=False))


def _row(piece: Piece, start: int, count: int, reverse: bool) -> int:
    """First row of the tokens that a walk meets as its start'th to (start + count)'th."""
    return piece.row + (piece.num_tokens - start - count if reverse else start)


def _num_segments(piece: Piece, total: int, wanted: int) -> int:
    share = round(wanted * piece.num_tokens / max(total, 1))
    return max(1, min(share, piece.num_tokens // MIN_SEGMENT))


def _cut(num_tokens: int, parts: int, shortest: int) -> list[int]:
    """Near-equal lengths in whole chunks, but for the last, which takes the rest."""
    parts = max(1, min(parts, num_tokens // shortest))
    chunks = num_tokens // CHUNK
    lengths = [((i + 1) * chunks // parts - i * chunks // parts) * CHUNK for i in range(parts)]
    lengths[-1] += num_tokens - chunks * CHUNK
    return lengths
