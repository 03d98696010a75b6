"""M1ForCausalLM: training, prefill and decode are one forward.

Shapes: B rows, T tokens, E hidden, V vocabulary; N tokens of any rows.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from m1serve.kernels.linear import fp32_logits
from m1serve.kernels.logprobs import LinearLogprobs, linear_logprobs
from m1serve.model.block import Block
from m1serve.model.config import M1Config
from m1serve.model.linear import Embedding, Linear
from m1serve.model.rmsnorm import RMSNorm
from m1serve.model.state import SequenceState
from m1serve.model.step import Step


class M1ForCausalLM(nn.Module):
    """Weights are whatever memory held until `init_weights` or a checkpoint fills them."""

    def __init__(self, config: M1Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    @property
    def blocks(self) -> list[Block]:
        return [cast(Block, layer) for layer in self.layers]

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Random: std 1/sqrt(fan_in), half of that into the residual, 1 for embeddings."""
        for name, weight in self.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
            elif name == "embed_tokens.weight":
                weight.normal_(0, 1, generator=generator)
            else:
                is_last = name.endswith(("out_proj.weight", "o_proj.weight", "w2_XEF"))
                scale = (0.5 if is_last else 1.0) / math.sqrt(weight.shape[-1])
                weight.normal_(0, scale, generator=generator)

    def hidden(
        self, ids_BT: Tensor, state: SequenceState | None = None, count_B: Tensor | None = None
    ) -> tuple[Tensor, SequenceState]:
        """Final normed hidden states [B, T, E] and the state after each row's real tokens.

        `count_B` says how many of a row's T tokens are real (right padding); what comes out past
        them means nothing.
        A fixed-capacity state is updated in place and returned; any other is not modified.
        """
        B, T = ids_BT.shape
        if state is None:
            state = SequenceState.empty(B, device=ids_BT.device)
        if not state.fixed_capacity:
            state = state.fork()
        columns = state.columns_after(T)
        step = Step.build(self.config, state.length_B, T, count_B, columns)
        x_BTE = self.embed_tokens(ids_BT)
        for block in self.layers:
            x_BTE = block(x_BTE, state, step)
        state.advance(step)
        return self.norm(x_BTE), state

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [..., V]: operands as stored, products and sums in fp32."""
        return fp32_logits(hidden, self.lm_head.weight)

    def token_logprobs(self, hidden_NE: Tensor, token_N: Tensor) -> LinearLogprobs:
        """fp32 log p of each token, [N], after what its hidden state has seen, and the entropy.

        As log_softmax of `logits`, which never exist all at once. Differentiable.
        """
        return linear_logprobs(hidden_NE, self.lm_head.weight, token_N)

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.logits(self.hidden(ids_BT)[0])

    def balance_loss(self) -> Tensor:
        """Mean over layers of the last training forward; num_experts_per_tok when balanced."""
        losses = [block.block_sparse_moe.balance for block in self.blocks]
        return torch.stack([loss for loss in losses if loss is not None]).mean()
