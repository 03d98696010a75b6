"""The mixture of experts: fp32 router, top weights renormalised, no token dropped.

Shapes: B rows, T tokens, N = B*T, E hidden, F ff of one expert, X experts, P experts per token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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

    def forward(self, g_BTE: Tensor) -> Tensor:
        x_NE = g_BTE.reshape(-1, g_BTE.shape[-1])
        p_NX = torch.softmax(F.linear(x_NE.float(), self.gate.weight.float()), -1)
        weight_NP, chosen_NP = p_NX.topk(self.num_chosen, -1)
        weight_NP = weight_NP / weight_NP.sum(-1, keepdim=True)
        if self.training:
            share_X = F.one_hot(chosen_NP, p_NX.shape[-1]).float().sum(1).mean(0)
            self.balance = p_NX.shape[-1] * (share_X * p_NX.mean(0)).sum()
        # dense never waits for the device; gathered does no work that is thrown away
        run = self.dense if x_NE.is_cuda else self.gathered
        return run(x_NE, weight_NP, chosen_NP).view_as(g_BTE)

    def dense(self, x_NE: Tensor, weight_NP: Tensor, chosen_NP: Tensor) -> Tensor:
        """Every expert on every token, weight 0 where it was not chosen."""
        X = self.w13_X2FE.shape[0]
        mix_NX = weight_NP.new_zeros(x_NE.shape[0], X).scatter(1, chosen_NP, weight_NP)
        a_XNF, b_XNF = torch.matmul(x_NE, self.w13_X2FE.transpose(1, 2)).chunk(2, -1)
        inner_XNF = F.silu(a_XNF) * b_XNF * mix_NX.t().unsqueeze(-1).to(a_XNF.dtype)
        return torch.matmul(inner_XNF, self.w2_XEF.transpose(1, 2)).sum(0)

    def gathered(self, x_NE: Tensor, weight_NP: Tensor, chosen_NP: Tensor) -> Tensor:
        """Each expert on its own tokens."""
        out_NE = torch.zeros_like(x_NE)
        order = chosen_NP.flatten().argsort(stable=True)
        counts = torch.bincount(chosen_NP.flatten(), minlength=self.w13_X2FE.shape[0]).tolist()
        # unbind, not indexing: its backward writes each expert's gradient once
        experts = zip(
            torch.split(order, counts), self.w13_X2FE.unbind(), self.w2_XEF.unbind(), strict=True
        )
        for picks, w13_2FE, w2_EF in experts:
            if not picks.numel():
                continue
            token = picks // self.num_chosen
            a, b = F.linear(x_NE.index_select(0, token), w13_2FE).chunk(2, -1)
            weight = weight_NP.flatten().index_select(0, picks).unsqueeze(-1)
            y = F.linear(F.silu(a) * b, w2_EF) * weight.to(x_NE.dtype)
            out_NE.index_add_(0, token, y)
        return out_NE
