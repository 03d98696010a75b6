"""How a packed batch is cut into work for the walk: pure Python, numbers in, numbers out.

A piece is a run of tokens of one sequence that starts from one state and ends in another. Few
pieces times heads leave most of a GPU idle; then a piece is cut into segments, and the states at
their starts come from a first pass over keys and values (`kernels.walk`). README.md says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

CHUNK = 64
MIN_SEGMENT = 16 * CHUNK
# a run's state is written and read: 64 KiB twice beside the 512 bytes of each of its tokens
MIN_RUN = 8 * CHUNK
RUN_PROGRAMS_PER_SM = 2

# what a walk reaches of the copy bandwidth when all SMs are busy under the power limit (H200, the
# notes of benchmarks/results/kernels-h200.json): two programs of 64 columns both read q and k
REACH = {64: 0.84, 128: 0.95}
# two more launches cost as long as copying this many bytes does
FIRST_PASS_BYTES = 170_000_000
BYTES_PER_VALUE = 2
FOREVER = 2**62

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
    ahead: int
    """Tokens between this run's end and the next segment's start."""
    fade: int
    """Tokens between the end of the run before it, or the segment's start, and its own end."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Runs [first, last) of one piece in walking order; then segment `final` starts."""

    first: int
    last: int
    source: int
    final: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What to launch: pieces that are walked whole, and the segments of those that are cut."""

    columns: int
    """Value columns of one program of the walk."""
    whole: tuple[Piece, ...] = ()
    """Longest first, so that the last programs to start are short."""
    segments: tuple[Piece, ...] = ()
    """Their sources are their own places among the start states."""
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


def make_plan(
    pieces: tuple[Piece, ...],
    windows: tuple[int, ...],
    head_dim: int,
    num_sms: int,
    *,
    reverse: bool = False,
) -> Plan:
    """The cheaper of two plans: programs of all 128 value columns, or twice as many of 64.

    `windows` says, a head each, after how many tokens nothing is left of a token in the state
    (FOREVER if that is not known): only those are read to find the state where a segment starts.
    """
    widths = [columns for columns in REACH if columns <= head_dim] or [head_dim]
    plans = [
        _cut_pieces(pieces, columns, windows, num_sms, head_dim, reverse) for columns in widths
    ]
    return min(plans, key=lambda plan: _cost(plan, windows, head_dim, num_sms))


def _cost(plan: Plan, windows: tuple[int, ...], head_dim: int, num_sms: int) -> float:
    """Bytes to move, as if all of the machine moved them at the rate of a copy."""
    num_heads = len(windows)
    items = plan.whole + plan.segments
    num_bytes = 4 * num_heads * sum(item.num_tokens for item in items)
    for run in plan.runs:
        num_bytes += 2 * sum(min(max(w - run.ahead, 0), run.num_tokens) for w in windows)
    num_bytes *= BYTES_PER_VALUE * head_dim
    fixed = FIRST_PASS_BYTES if plan.chains else 0
    return num_bytes / _reach(len(items), num_heads, head_dim, plan.columns, num_sms) + fixed


def best_columns(num_items: int, num_heads: int, head_dim: int, num_sms: int) -> int:
    """Value columns of a program for items whose lengths the host does not know."""
    widths = [columns for columns in REACH if columns <= head_dim] or [head_dim]
    return max(widths, key=lambda width: _reach(num_items, num_heads, head_dim, width, num_sms))


def _reach(num_items: int, num_heads: int, head_dim: int, columns: int, num_sms: int) -> float:
    """Share of the copy bandwidth: the last wave of programs leaves SMs idle."""
    programs = num_items * num_heads * (head_dim // columns)
    busy = programs / (-(-programs // num_sms) * num_sms) if programs else 1.0
    return REACH.get(columns, 1.0) * busy


def _cut_pieces(
    pieces: tuple[Piece, ...],
    columns: int,
    windows: tuple[int, ...],
    num_sms: int,
    head_dim: int,
    reverse: bool,
) -> Plan:
    """Pieces as they are where they fill the machine, else cut into near-equal segments."""
    num_heads = len(windows)
    wanted = num_sms // (num_heads * (head_dim // columns))
    total = sum(piece.num_tokens for piece in pieces)
    shares = [_num_segments(piece, total, wanted) for piece in pieces]
    if max(shares, default=1) == 1:
        return Plan(columns=columns, whole=_longest_first(pieces))
    # of segments with a successor: the last ones' own states have no reader
    longest = max(total // sum(shares), MIN_SEGMENT)
    run_tokens = _run_tokens(longest, windows, sum(shares) - len(shares), num_sms)
    whole = [piece for piece, share in zip(pieces, shares, strict=True) if share == 1]
    segments: list[Piece] = []
    runs: list[Run] = []
    chains: list[Chain] = []
    for piece, share in zip(pieces, shares, strict=True):
        if share == 1:
            continue
        first_run = len(runs)
        for start, count in _spans(_cut(piece.num_tokens, share, MIN_SEGMENT)):
            is_last = start + count == piece.num_tokens
            target = piece.target if is_last else NO_SLOT
            index = len(segments)
            segments.append(Piece(_row(piece, start, count, reverse), count, index, target))
            if not is_last:
                reach = min(count, _whole_chunks(max(windows)))
                runs += _runs(piece, start, count, reach, run_tokens, index, reverse)
        chains.append(Chain(first_run, len(runs), piece.source, len(segments) - 1))
    return Plan(
        columns=columns,
        whole=_longest_first(whole),
        segments=tuple(segments),
        runs=tuple(runs),
        chains=tuple(chains),
    )


def _longest_first(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    return tuple(sorted(pieces, key=lambda piece: -piece.num_tokens))


def _run_tokens(segment: int, windows: tuple[int, ...], num_read: int, num_sms: int) -> int:
    """Shortest runs that still are no more programs with work than the machine runs at once."""
    run_tokens = MIN_RUN
    while run_tokens < segment:
        programs = num_read * sum(-(-min(segment, window) // run_tokens) for window in windows)
        if programs <= RUN_PROGRAMS_PER_SM * num_sms:
            break
        run_tokens *= 2
    return run_tokens


def _runs(
    piece: Piece, start: int, count: int, reach: int, run_tokens: int, segment: int, reverse: bool
) -> list[Run]:
    """Runs over the last `reach` tokens of the segment [start, start + count)."""
    runs: list[Run] = []
    for begin, tokens in _spans(_cut(reach, max(1, reach // run_tokens), MIN_RUN)):
        first = count - reach + begin
        runs.append(
            Run(
                _row(piece, start + first, tokens, reverse),
                tokens,
                NO_SLOT if runs else segment,
                reach - begin - tokens,
                tokens if runs else first + tokens,
            )
        )
    return runs


def _whole_chunks(num_tokens: int) -> int:
    return -(-num_tokens // CHUNK) * CHUNK


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
