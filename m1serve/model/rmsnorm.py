"""RMSNorm with fp32 statistics, whatever the weights are stored in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from m1serve.kernels.residual import Normed, Sum, rms_norm, rms_norm_of_sum


class RMSNorm(nn.Module):
    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor | Sum) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def with_input(self, x: Tensor | Sum) -> Normed:
        """The normed values and what they were made of, a sum added up."""
        return rms_norm_of_sum(x, self.weight, self.eps)
