"""The softmax attention layer: grouped queries, rotary positions on the first channels.

Shapes: B rows, T tokens, E hidden, H heads, K kv heads, D head dim.
"""

from __future__ import annotations

from torch import Tensor, nn

from m1serve.kernels.linear import linears
from m1serve.model.config import M1Config
from m1serve.model.linear import Linear
from m1serve.model.state import SequenceState
from m1serve.model.step import Step


class SoftmaxAttention(nn.Module):
    def __init__(self, config: M1Config, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        E, D = config.hidden_size, config.head_dim
        H, K = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = Linear(E, H * D)
        self.k_proj = Linear(E, K * D)
        self.v_proj = Linear(E, K * D)
        self.o_proj = Linear(H * D, E)

    def forward(self, h_BTE: Tensor, state: SequenceState, step: Step) -> Tensor:
        B, T, _ = h_BTE.shape
        weights = [self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]
        q_BTX, k_BTX, v_BTX = linears(h_BTE, weights)
        q_BHTD = step.rotate(self._heads(q_BTX).transpose(1, 2))
        k_BKTD = step.rotate(self._heads(k_BTX).transpose(1, 2))
        v_BTKD = self._heads(v_BTX)
        o_BTHD = state.attend(
            self.layer, q_BHTD.transpose(1, 2), k_BKTD.transpose(1, 2), v_BTKD, step
        )
        y_BTE: Tensor = self.o_proj(o_BTHD.reshape(B, T, -1).to(h_BTE.dtype))
        return y_BTE

    def _heads(self, flat_BTX: Tensor) -> Tensor:
        return flat_BTX.view(*flat_BTX.shape[:2], -1, self.config.head_dim).float()
