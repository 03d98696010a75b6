"""Samples become minibatches of whole groups, and microbatches that run a shared prefix once.

Expanding the state after the prefix to all rows is exact in the forward pass and in the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from m1serve.online_rl.samples import Group, Sample

MIN_SHARED_TOKENS = 32
"""A shorter prefix costs more as a pass of its own than it saves."""
PASS_TOKENS = 256
"""What one more forward pass costs, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    sample: Sample
    norm: float
    """1 / (trained tokens of the group × groups in the minibatch)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Rows of similar length; the first `prefix_length` ids are the same in every row."""

    rows: tuple[Row, ...]
    prefix_length: int

    @property
    def num_tokens(self) -> int:
        """Real tokens that go through the model."""
        lengths = sum(len(r.sample.token_ids) - self.prefix_length for r in self.rows)
        return self.prefix_length + lengths


def split_minibatches(groups: Sequence[Group], num_minibatches: int) -> list[list[Row]]:
    """Whole groups, in the given order, in at most `num_minibatches` parts of nearly equal size."""
    num = min(num_minibatches, len(groups))
    minibatches = []
    for i in range(num):
        part = groups[i * len(groups) // num : (i + 1) * len(groups) // num]
        minibatches.append(
            [
                Row(sample=sample, norm=1.0 / (group.num_trained * len(part)))
                for group in part
                for sample in group.samples
            ]
        )
    return minibatches


def pack_microbatches(rows: Sequence[Row], max_rows: int) -> list[Microbatch]:
    """Each row in exactly one microbatch; rows with different prefixes go to different
    microbatches.
    """
    if not rows:
        return []
    packed = []
    for bucket in _share_prefixes(sorted(rows, key=lambda r: r.sample.token_ids)):
        by_length = sorted(bucket.rows, key=lambda r: len(r.sample.token_ids))
        for i in range(0, len(by_length), max_rows):
            part = tuple(by_length[i : i + max_rows])
            is_shared = len(part) > 1
            packed.append(
                Microbatch(rows=part, prefix_length=bucket.prefix_length if is_shared else 0)
            )
    return packed


def _share_prefixes(rows: Sequence[Row]) -> list[Microbatch]:
    """Cuts rows, sorted by ids, where that saves tokens: one long prefix for all, or longer ones
    for parts.
    """
    length = _common_length(rows)
    shared = Microbatch(
        rows=tuple(rows), prefix_length=length if length >= MIN_SHARED_TOKENS else 0
    )
    cuts = [
        i
        for i in range(1, len(rows))
        if rows[i].sample.token_ids[length] != rows[i - 1].sample.token_ids[length]
    ]
    if not cuts:
        return [shared]
    parts = [rows[i:j] for i, j in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    inner = [bucket for part in parts for bucket in _share_prefixes(part)]
    return inner if sum(map(_saved, inner)) > _saved(shared) else [shared]


def _saved(bucket: Microbatch) -> int:
    return (len(bucket.rows) - 1) * bucket.prefix_length - PASS_TOKENS


def _common_length(rows: Sequence[Row]) -> int:
    """Leading ids that all rows (sorted by ids) share and none trains or predicts a trained token
    with.
    """
    room = min(r.sample.is_trained.index(True) - 1 for r in rows)
    first, last = rows[0].sample.token_ids, rows[-1].sample.token_ids
    length = 0
    while length < room and first[length] == last[length]:
        length += 1
    return length
