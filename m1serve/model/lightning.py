"""The lightning attention layer: silu on q, k and v, no positions, no scale, a decaying state.

Shapes: B rows, T tokens, E hidden, H heads, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1serve.kernels.decay import slopes
from m1serve.kernels.lightning import lightning_decode, lightning_prefill
from m1serve.model.config import M1Config
from m1serve.model.linear import Linear
from m1serve.model.rmsnorm import RMSNorm
from m1serve.model.state import SequenceState
from m1serve.model.step import Step

# not config.rms_norm_eps: MiniMax's layer leaves its own norm at the class default
OUTPUT_NORM_EPS = 1e-6


class LightningAttention(nn.Module):
    def __init__(self, config: M1Config, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        inner = config.num_attention_heads * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, 3 * inner)
        self.output_gate = Linear(config.hidden_size, inner)
        self.out_proj = Linear(inner, config.hidden_size)
        self.norm = RMSNorm(inner, eps=OUTPUT_NORM_EPS)
        # not a buffer: a cast of the module to bf16 would round it
        self._slope_H: Tensor | None = None

    def slopes_on(self, device: torch.device) -> Tensor:
        """The layer's fp32 slopes [H], made where they are needed."""
        if self._slope_H is None or self._slope_H.device != device:
            config = self.config
            made_H = slopes(config.num_attention_heads, config.num_hidden_layers, self.layer)
            self._slope_H = made_H.to(device)
        return self._slope_H

    def forward(self, h_BTE: Tensor, state: SequenceState, step: Step) -> Tensor:
        B, T, _ = h_BTE.shape
        H, D = self.config.num_attention_heads, self.config.head_dim
        # rows of qkv_proj are interleaved a head: q, k, v of head 0, then of head 1
        qkv = F.silu(self.qkv_proj(h_BTE).float()).view(B, T, H, 3 * D)
        q_BTHD, k_BTHD, v_BTHD = torch.split(qkv, D, -1)
        o_BTHD = (self._decode if T == 1 else self._prefill)(q_BTHD, k_BTHD, v_BTHD, state, step)
        o_BTI = self.norm(o_BTHD.reshape(B, T, H * D))
        y_BTE: Tensor = self.out_proj(torch.sigmoid(self.output_gate(h_BTE)) * o_BTI)
        return y_BTE

    def _prefill(
        self, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, state: SequenceState, step: Step
    ) -> Tensor:
        o_BTHD, after_BHDD = lightning_prefill(
            q_BTHD,
            k_BTHD,
            v_BTHD,
            self.slopes_on(q_BTHD.device),
            state.lightning.get(self.layer),
            step.count_B,
        )
        state.put_lightning(self.layer, after_BHDD)
        return o_BTHD

    def _decode(
        self, q_B1HD: Tensor, k_B1HD: Tensor, v_B1HD: Tensor, state: SequenceState, step: Step
    ) -> Tensor:
        B, _, H, D = q_B1HD.shape
        s_BHDD = state.lightning.get(self.layer)
        if s_BHDD is None:
            s_BHDD = q_B1HD.new_zeros(B, H, D, D)
        elif not state.fixed_capacity:
            s_BHDD = s_BHDD.clone(memory_format=torch.contiguous_format)
        slope_H = self.slopes_on(s_BHDD.device)
        o_BHD = lightning_decode(
            q_B1HD[:, 0], k_B1HD[:, 0], v_B1HD[:, 0], slope_H, s_BHDD, step.count_B
        )
        if not state.fixed_capacity:
            state.lightning[self.layer] = s_BHDD
        return o_BHD.unsqueeze(1)
