"""Other tiles of the decode step's products beside the chosen ones: what to read before a change.

Shapes: N tokens, E hidden, F inner, X experts, O out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from m1serve.kernels.benchmark.cases import Case
from m1serve.kernels.benchmark.layer_cases import case_of
from m1serve.kernels.benchmark.report import Row
from m1serve.kernels.benchmark.step_cases import (
    PROJECTIONS,
    experts_name,
    experts_row,
    product_row,
)

if TYPE_CHECKING:
    from m1serve.kernels.linear_triton import Tile

# rows, depth, stages: in shared memory at 16 tokens one, two or three programs a multiprocessor
TILES = (
    (64, 128, 5),
    (64, 128, 3),
    (64, 128, 10),
    (64, 64, 10),
    (64, 256, 5),
    (128, 64, 5),
    (128, 128, 5),
    (32, 256, 5),
    (32, 128, 8),
    (32, 256, 8),
    (16, 512, 4),
)
BATCHES = (1, 16)


def tile_cases() -> Iterator[Case]:
    for num_tokens in BATCHES:
        for shape in TILES:
            yield case_of(
                "tiles, moe_decode",
                experts_name(num_tokens),
                tile_name(shape),
                partial(_experts, num_tokens, shape),
            )
        for name in PROJECTIONS:
            for shape in TILES:
                yield case_of(
                    "tiles, linear",
                    f"{name} N={num_tokens}",
                    tile_name(shape),
                    partial(_product, num_tokens, name, shape),
                )


def tile_name(shape: tuple[int, int, int]) -> str:
    return "{}x{}, {} stages".format(*shape)


def _experts(num_tokens: int, shape: tuple[int, int, int]) -> Row:
    from m1serve.kernels.moe_decode import expert_picks

    return experts_row(partial(expert_picks, tile=_tile(shape)), num_tokens)


def _product(num_tokens: int, name: str, shape: tuple[int, int, int]) -> Row:
    from m1serve.kernels.linear_triton import multiply

    tile = _tile(shape)

    def product(x_NE: Tensor, weight_OE: Tensor) -> object:
        return multiply(x_NE, [weight_OE], torch.bfloat16, tile=tile)

    return product_row(product, num_tokens, PROJECTIONS[name])


def _tile(shape: tuple[int, int, int]) -> Tile:
    from m1serve.kernels.linear_triton import Tile

    rows, depth, num_stages = shape
    return Tile(rows=rows, depth=depth, tokens=16, num_stages=num_stages)
