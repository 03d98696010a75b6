"""Projections and embeddings without a bias and without an initialisation of their own.

Weights come from a checkpoint or from `init_weights`; drawing others first costs a second at start.
"""

from __future__ import annotations

from torch import Tensor, nn

from m1serve.kernels.linear import linear


class Linear(nn.Linear):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)

    def reset_parameters(self) -> None:
        """Leaves the weight as it was allocated."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Leaves the weight as it was allocated."""
