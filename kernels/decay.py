"""The decay slopes of lightning attention: one definition for every layer, rank and kernel.

A head's state shrinks by exp(-slope * n) over n tokens. Kernels must take that exponential of the
product: powers of a rounded exp(-slope) drift, and in bf16 most late heads would not decay at all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def slopes(
    num_heads: int, num_layers: int, layer: int, *, tp_rank: int = 0, tp_size: int = 1
) -> Tensor:
    """fp32 slopes [H / tp_size] of one layer's heads, rounded once from float64.

    `layer` counts every layer of the model, softmax layers too. A tensor-parallel rank gets its
    slice of the global slopes: those of its local head count would be another model's.
    """
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer {layer} is not in a model of {num_layers} layers")
    if num_heads < 1:
        raise ValueError(f"num_heads is {num_heads}, wanted at least 1")
    if tp_size < 1 or num_heads % tp_size or not 0 <= tp_rank < tp_size:
        raise ValueError(f"rank {tp_rank} of {tp_size} cannot hold a share of {num_heads} heads")
    depth = 1 - layer / max(num_layers - 1, 1) + 1e-5
    share = num_heads // tp_size
    local = _head_slopes(num_heads)[tp_rank * share : (tp_rank + 1) * share]
    return torch.tensor([slope * depth for slope in local], dtype=torch.float64).float()


def _head_slopes(num_heads: int) -> list[float]:
    """ALiBi's geometric sequence; other counts interleave the sequence of the next power of two."""
    power = 2 ** math.floor(math.log2(num_heads))
    geometric = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    if power == num_heads:
        return geometric
    finer = _head_slopes(2 * power)[0::2]
    return geometric + finer[: num_heads - power]
