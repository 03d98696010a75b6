"""One layer: attention, then experts, each after a norm.

Under `postnorm` (M1) the residual is the normalised input.

Shapes: B rows, T tokens, E hidden.
"""

from __future__ import annotations

from torch import Tensor, nn

from m1serve.kernels.residual import Picks, Sum, is_fused
from m1serve.model.config import SOFTMAX, M1Config
from m1serve.model.lightning import LightningAttention
from m1serve.model.moe import SparseMoE
from m1serve.model.rmsnorm import RMSNorm
from m1serve.model.softmax import SoftmaxAttention
from m1serve.model.state import SequenceState
from m1serve.model.step import Step


class Block(nn.Module):
    def __init__(self, config: M1Config, layer: int) -> None:
        super().__init__()
        self.config = config
        self.self_attn: LightningAttention | SoftmaxAttention
        if config.attn_type_list[layer] == SOFTMAX:
            self.self_attn = SoftmaxAttention(config, layer)
            self.attn_alpha = config.layernorm_full_attention_alpha
            self.attn_beta = config.layernorm_full_attention_beta
        else:
            self.self_attn = LightningAttention(config, layer)
            self.attn_alpha = config.layernorm_linear_attention_alpha
            self.attn_beta = config.layernorm_linear_attention_beta
        self.mlp_alpha = config.layernorm_mlp_alpha
        self.mlp_beta = config.layernorm_mlp_beta
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.block_sparse_moe = SparseMoE(config)

    def forward(self, x_BTE: Tensor | Sum, state: SequenceState, step: Step) -> Tensor | Sum:
        """The layer's output [B, T, E]; where kernels serve, as the sum that the next norm adds."""
        h_BTE, residual_BTE = self._normed(self.input_layernorm, x_BTE)
        attended_BTE: Tensor = self.self_attn(h_BTE, state, step)
        x_BTE = Sum(residual_BTE, attended_BTE, self.attn_alpha, self.attn_beta)
        g_BTE, residual_BTE = self._normed(self.post_attention_layernorm, x_BTE)
        mixed: Tensor | Picks = self.block_sparse_moe(g_BTE)
        out_BTE = Sum(residual_BTE, mixed, self.mlp_alpha, self.mlp_beta)
        return out_BTE if is_fused(residual_BTE) else out_BTE.total()

    def _normed(self, norm: RMSNorm, x_BTE: Tensor | Sum) -> tuple[Tensor, Tensor]:
        """What the branch reads, and the residual it is added to."""
        if self.config.postnorm:
            h_BTE: Tensor = norm(x_BTE)
            return h_BTE, h_BTE
        total_BTE, h_BTE = norm.with_input(x_BTE)
        return h_BTE, total_BTE
