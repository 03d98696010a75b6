"""Walks over packed sequences or padded rows, on the device that holds them.

Shapes: B rows, T tokens, H heads, D head dim, N sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from m1serve.kernels.attention import Walk
from m1serve.kernels.plan import NO_SLOT, Piece
from m1serve.kernels.reference import walk_pieces


def walk_pieces_on(device: torch.device) -> Walk:
    """`prefill.run_pieces` on CUDA, its reference elsewhere."""
    if device.type == "cuda":
        from m1serve.kernels.prefill import run_pieces

        return run_pieces
    return walk_pieces


def walk_sequences(bounds: Sequence[int], device: torch.device) -> Walk:
    """A walk over whole sequences, the n-th from state n to state n."""
    run = walk_pieces_on(device)
    spans = list(pairwise(bounds))

    def walk(
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        o_THD: Tensor,
        slope_H: Tensor,
        source_NHDD: Tensor | None,
        target_NHDD: Tensor | None,
        *,
        reverse: bool = False,
    ) -> None:
        pieces = tuple(
            Piece(
                begin,
                end - begin,
                NO_SLOT if source_NHDD is None else n,
                NO_SLOT if target_NHDD is None else n,
            )
            for n, (begin, end) in enumerate(spans)
        )
        run(
            q_THD, k_THD, v_THD, o_THD, slope_H, pieces, source_NHDD, target_NHDD, reverse=reverse
        )  # fmt: skip

    return walk


def walk_counts(count_B: Tensor, row_length: int) -> Walk:
    """A walk over the first count_B tokens of rows of equal length; the host learns no count."""
    from m1serve.kernels.prefill import run_items

    row_B = torch.arange(count_B.shape[0], device=count_B.device)
    none_B = torch.full_like(row_B, NO_SLOT)

    def walk(
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        o_THD: Tensor,
        slope_H: Tensor,
        source_NHDD: Tensor | None,
        target_NHDD: Tensor | None,
        *,
        reverse: bool = False,
    ) -> None:
        items_B4 = torch.stack(
            [
                row_B * row_length,
                count_B.to(torch.int64),
                none_B if source_NHDD is None else row_B,
                none_B if target_NHDD is None else row_B,
            ],
            1,
        )
        # what no walk reaches must still be a number: gradients of padding are summed
        o_THD.zero_()
        run_items(
            q_THD, k_THD, v_THD, o_THD, slope_H, items_B4, source_NHDD, target_NHDD, reverse=reverse
        )  # fmt: skip

    return walk
