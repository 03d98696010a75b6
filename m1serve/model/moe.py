"""The mixture of experts: the weights, and the balance of the last training forward.

Shapes: B rows, T tokens, N = B*T, E hidden, F ff of one expert, X experts, P experts per token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1serve.kernels.moe import experts, route, routed_experts
from m1serve.kernels.residual import Picks
from m1serve.model.config import M1Config
from m1serve.model.linear import Linear


class SparseMoE(nn.Module):
    def __init__(self, config: M1Config) -> None:
        super().__init__()
        X, E, ff = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.num_chosen = config.num_experts_per_tok
        self.gate = Linear(E, X)
        self.w13_X2FE = nn.Parameter(torch.empty(X, 2 * ff, E))
        self.w2_XEF = nn.Parameter(torch.empty(X, E, ff))
        self.balance: Tensor | None = None
        """Of the last training forward: X * sum(share of choices * mean probability)."""

    def forward(self, g_BTE: Tensor) -> Tensor | Picks:
        """As g; where kernels serve, the terms that the next norm adds."""
        x_NE = g_BTE.reshape(-1, g_BTE.shape[-1])
        w13_X2FE, w2_XEF = self.w13_X2FE, self.w2_XEF
        if self.training:
            weight_NP, chosen_NP, p_NX = route(x_NE, self.gate.weight, self.num_chosen)
            share_X = F.one_hot(chosen_NP, p_NX.shape[-1]).float().sum(1).mean(0)
            self.balance = p_NX.shape[-1] * (share_X * p_NX.mean(0)).sum()
            out = experts(x_NE, w13_X2FE, w2_XEF, weight_NP, chosen_NP)
        else:
            out = routed_experts(x_NE, self.gate.weight, w13_X2FE, w2_XEF, self.num_chosen)
        return out if isinstance(out, Picks) else out.view_as(g_BTE)
