"""The softmax attention layer: grouped queries, rotary positions on the first channels.

Shapes: B rows, T tokens, E hidden, H heads, K kv heads, D head dim.
"""

from __future__ import annotations

from torch import Tensor, nn

from m1serve.kernels.linear import linears
from m1serve.kernels.residual import is_fused
from m1serve.kernels.rotary import rotate_
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
        q_BTHD, k_BTKD, v_BTKD = (self._heads(t_BTX) for t_BTX in linears(h_BTE, weights))
        if is_fused(h_BTE):
            # in place: nothing else reads the projections
            rotate_(q_BTHD, k_BTKD, step.cos_b1TR[:, 0], step.sin_b1TR[:, 0])
        else:
            q_BTHD, k_BTKD, v_BTKD = q_BTHD.float(), k_BTKD.float(), v_BTKD.float()
            q_BTHD = step.rotate(q_BTHD.transpose(1, 2)).transpose(1, 2)
            k_BTKD = step.rotate(k_BTKD.transpose(1, 2)).transpose(1, 2)
        o_BTHD = state.attend(self.layer, q_BTHD, k_BTKD, v_BTKD, step)
        y_BTE: Tensor = self.o_proj(o_BTHD.reshape(B, T, -1).to(h_BTE.dtype))
        return y_BTE

    def _heads(self, flat_BTX: Tensor) -> Tensor:
        return flat_BTX.view(*flat_BTX.shape[:2], -1, self.config.head_dim)
