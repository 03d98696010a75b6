"""Batches of demonstrations, drawn on the fly by worker processes; nothing is ever seen twice.

Shapes: P system prompts, S tokens of a prompt, B rows, W tokens of a row after its prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of like length; every row continues one of the prompts."""

    kind: str
    """desk or maths"""
    prompts_PS: Tensor
    prompt_length_P: Tensor
    prompt_of_B: Tensor
    ids_BW: Tensor
    weight_BW: Tensor
    """0 padding, 1 read, 2 said by the clerk"""

    def tensors(self) -> tuple[Tensor, ...]:
        return (
            self.prompts_PS,
            self.prompt_length_P,
            self.prompt_of_B,
            self.ids_BW,
            self.weight_BW,
        )

    def to(self, device: torch.device) -> Part:
        prompts_PS, prompt_length_P, prompt_of_B, ids_BW, weight_BW = (
            t.to(device, non_blocking=True) for t in self.tensors()
        )
        return replace(
            self,
            prompts_PS=prompts_PS,
            prompt_length_P=prompt_length_P,
            prompt_of_B=prompt_of_B,
            ids_BW=ids_BW,
            weight_BW=weight_BW,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Tokens that prompts and rows may have; fixed, so that shapes repeat."""

    prompt: int
    """Of a desk; desks with longer ones are not used."""
    desk: tuple[int, ...]
    """Rows of each part."""
    maths: int


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
        rows.sort(key=lambda c: len(c.ids))
        num = shape.desk_parts
        cuts = [i * len(rows) // num for i in range(num + 1)]
        parts = [
            _part("desk", rows[a:b], width, shape.desks, self.widths.prompt)
            for a, b, width in zip(cuts, cuts[1:], self.widths.desk, strict=False)
        ]
        maths = [maths_conversation(tok, rng, self.mix) for _ in range(shape.maths_rows)]
        room = len(maths[0].prefix_ids) if maths else 0
        return parts + ([_part("maths", maths, self.widths.maths, 1, room)] if maths else [])


def measure_widths(tokenizer: Path, shape: BatchShape, mix: DemonstrationMix) -> Widths:
    """Quantiles of the lengths with a little room, in steps of 8."""
    tok, rng = ChatTokenizer.load(tokenizer), random.Random("widths")
    desks = [draw_desk(rng) for _ in range(_SAMPLE_DESKS)]
    prompts = sorted(len(prompt_ids(tok, d.system, d.tools)) for d in desks)
    rows = _desk_rows(tok, rng, mix, desks, _SAMPLE_ROWS, shape.max_tokens)
    lengths = sorted(len(c.ids) for c in rows)
    num = shape.desk_parts
    edges = [lengths[(i + 1) * len(lengths) // num - 1] for i in range(num - 1)]
    longest = max(len(maths_conversation(tok, rng, mix).ids) for _ in range(_SAMPLE_ROWS))
    desk = (*(_rounded(1.06 * edge) for edge in edges), _rounded(shape.max_tokens))
    return Widths(prompt=_rounded(prompts[-1]), desk=desk, maths=_rounded(longest))


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


def _part(kind: str, rows: list[Conversation], width: int, num_prompts: int, room: int) -> Part:
    """Rows that are too long for their part by chance lose their end."""
    number_of: dict[tuple[int, ...], int] = {}
    prompt_of_B = [number_of.setdefault(row.prefix_ids, len(number_of)) for row in rows]
    prompts_PS = torch.zeros(num_prompts, room, dtype=torch.long)
    length_P = torch.ones(num_prompts, dtype=torch.long)
    for prompt, number in number_of.items():
        prompts_PS[number, : len(prompt)] = torch.tensor(prompt)
        length_P[number] = len(prompt)
    ids_BW = torch.zeros(len(rows), width, dtype=torch.long)
    weight_BW = torch.zeros(len(rows), width, dtype=torch.uint8)
    for i, row in enumerate(rows):
        num = min(len(row.ids), width)
        ids_BW[i, :num] = torch.tensor(row.ids[:num])
        weight_BW[i, :num] = torch.tensor(row.is_said[:num], dtype=torch.uint8) + 1
    return Part(
        kind=kind,
        prompts_PS=prompts_PS,
        prompt_length_P=length_P,
        prompt_of_B=torch.tensor(prompt_of_B),
        ids_BW=ids_BW,
        weight_BW=weight_BW,
    )
