"""Batches of demonstrations, drawn on the fly by worker processes; nothing is ever seen twice.

Shapes: P system prompts, S tokens of a prompt, B rows, W tokens of a row after its prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, get_worker_info

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.envs.policy import Desk
from m1serve.online_rl.demonstrations import (
    Conversation,
    DemonstrationMix,
    desk_conversation,
    draw_desk,
    maths_conversation,
    prompt_ids,
)
from m1serve.online_rl.sft_recipe import BatchShape

_SAMPLE_DESKS, _SAMPLE_ROWS = 40, 800


Ints = npt.NDArray[np.int16]
# read and said tokens in `kind_BW`; 0 is padding
READ, SAID = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of like length; every row continues one of the prompts. Small, to cross processes."""

    name: str
    """desk or maths"""
    prompts_PS: Ints
    prompt_length_P: Ints
    prompt_of_B: Ints
    ids_BW: Ints
    kind_BW: Ints

    def arrays(self) -> tuple[Ints, ...]:
        return (
            self.prompts_PS,
            self.prompt_length_P,
            self.prompt_of_B,
            self.ids_BW,
            self.kind_BW,
        )

    @property
    def shape(self) -> tuple[tuple[int, ...], ...]:
        return tuple(a.shape for a in self.arrays())

    @property
    def num_tokens(self) -> int:
        """Of the rows, padding left out."""
        return int(np.count_nonzero(self.kind_BW))

    @property
    def num_said(self) -> int:
        return int(np.count_nonzero(self.kind_BW == SAID))


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Tokens that prompts and rows may have; fixed, so that shapes repeat."""

    prompt: int
    """Of a desk; desks with longer ones are not used."""
    desk: tuple[int, ...]
    """Rows of each part."""
    maths: tuple[int, ...]


class DemonstrationBatches(IterableDataset[list[Part]]):
    """Yields the parts of one optimizer step after another, for ever."""

    def __init__(
        self, tokenizer: Path, shape: BatchShape, mix: DemonstrationMix, widths: Widths, seed: int
    ) -> None:
        super().__init__()
        self.tokenizer, self.shape, self.mix = tokenizer, shape, mix
        self.widths, self.seed = widths, seed

    def __iter__(self) -> Iterator[list[Part]]:
        worker = get_worker_info()
        rng = random.Random(f"{self.seed}/{worker.id if worker else 0}")
        tok = ChatTokenizer.load(self.tokenizer)
        while True:
            yield self.draw(tok, rng)

    def draw(self, tok: ChatTokenizer, rng: random.Random) -> list[Part]:
        shape = self.shape
        desks = _draw_desks(tok, rng, shape.desks, self.widths.prompt)
        rows = _desk_rows(tok, rng, self.mix, desks, shape.desk_rows, shape.max_tokens)
        maths = [maths_conversation(tok, rng, self.mix) for _ in range(shape.maths_rows)]
        maths_room = len(maths[0].prefix_ids)
        return [
            *_parts("desk", rows, self.widths.desk, shape.desks, self.widths.prompt),
            *_parts("maths", maths, self.widths.maths, 1, maths_room),
        ]


def measure_widths(tokenizer: Path, shape: BatchShape, mix: DemonstrationMix) -> Widths:
    """Quantiles of the lengths with a little room, in steps of 8."""
    tok, rng = ChatTokenizer.load(tokenizer), random.Random("widths")
    desks = [draw_desk(rng) for _ in range(_SAMPLE_DESKS)]
    prompts = sorted(len(prompt_ids(tok, d.system, d.tools)) for d in desks)
    rows = _desk_rows(tok, rng, mix, desks, _SAMPLE_ROWS, shape.max_tokens)
    maths = [maths_conversation(tok, rng, mix) for _ in range(_SAMPLE_ROWS)]
    longest = max(len(c.ids) for c in maths)
    return Widths(
        prompt=_rounded(prompts[-1]),
        desk=_edges(rows, shape.desk_parts, shape.max_tokens),
        maths=_edges(maths, shape.maths_parts, longest),
    )


def _edges(rows: Sequence[Conversation], num_parts: int, longest: int) -> tuple[int, ...]:
    lengths = sorted(len(c.ids) for c in rows)
    inner = [lengths[(i + 1) * len(lengths) // num_parts - 1] for i in range(num_parts - 1)]
    return (*(_rounded(1.06 * edge) for edge in inner), _rounded(longest))


def _rounded(width: float) -> int:
    return -(-int(width) // 8) * 8


def _draw_desks(tok: ChatTokenizer, rng: random.Random, count: int, room: int) -> list[Desk]:
    desks: list[Desk] = []
    while len(desks) < count:
        desk = draw_desk(rng)
        if len(prompt_ids(tok, desk.system, desk.tools)) <= room:
            desks.append(desk)
    return desks


def _desk_rows(
    tok: ChatTokenizer,
    rng: random.Random,
    mix: DemonstrationMix,
    desks: Sequence[Desk],
    num_rows: int,
    max_tokens: int,
) -> list[Conversation]:
    rows: list[Conversation] = []
    while len(rows) < num_rows:
        row = desk_conversation(tok, desks[len(rows) % len(desks)], rng, mix)
        if len(row.ids) <= max_tokens:
            rows.append(row)
    return rows


def _parts(
    name: str, rows: list[Conversation], widths: tuple[int, ...], num_prompts: int, room: int
) -> list[Part]:
    rows.sort(key=lambda c: len(c.ids))
    cuts = [i * len(rows) // len(widths) for i in range(len(widths) + 1)]
    return [
        _part(name, rows[a:b], width, num_prompts, room)
        for a, b, width in zip(cuts, cuts[1:], widths, strict=False)
    ]


def _part(name: str, rows: list[Conversation], width: int, num_prompts: int, room: int) -> Part:
    """Rows that are too long for their part by chance lose their end."""
    number_of: dict[tuple[int, ...], int] = {}
    prompt_of_B = [number_of.setdefault(row.prefix_ids, len(number_of)) for row in rows]
    prompts_PS = np.zeros((num_prompts, room), np.int16)
    length_P = np.ones(num_prompts, np.int16)
    for prompt, number in number_of.items():
        prompts_PS[number, : len(prompt)] = prompt
        length_P[number] = len(prompt)
    ids_BW = np.zeros((len(rows), width), np.int16)
    kind_BW = np.zeros((len(rows), width), np.int16)
    for i, row in enumerate(rows):
        num = min(len(row.ids), width)
        ids_BW[i, :num] = row.ids[:num]
        kind_BW[i, :num] = [SAID if said else READ for said in row.is_said[:num]]
    return Part(
        name=name,
        prompts_PS=prompts_PS,
        prompt_length_P=length_P,
        prompt_of_B=np.array(prompt_of_B, np.int16),
        ids_BW=ids_BW,
        kind_BW=kind_BW,
    )
