"""The lightning attention layer: silu on q, k and v, no positions, no scale, a decaying state.

Shapes: B rows, T tokens, E hidden, H heads, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1serve.kernels.decay import slopes
from m1serve.kernels.lightning import lightning_rows, lightning_rows_step
from m1serve.kernels.linear import linears
from m1serve.kernels.norm import gated_rms_norm
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
            # whoever asks first, training must be able to save it
            with torch.inference_mode(False):
                made_H = slopes(config.num_attention_heads, config.num_hidden_layers, self.layer)
                self._slope_H = made_H.to(device)
        return self._slope_H

    def forward(self, h_BTE: Tensor, state: SequenceState, step: Step) -> Tensor:
        B, T, _ = h_BTE.shape
        H, D = self.config.num_attention_heads, self.config.head_dim
        # rows of qkv_proj are interleaved a head: q, k, v of head 0, then of head 1
        qkv_BTX, gate_BTI = linears(h_BTE, [self.qkv_proj.weight, self.output_gate.weight])
        qkv = qkv_BTX.view(B, T, H, 3 * D)
        # a step in place has no gradients
        is_step = T == 1 and not torch.is_grad_enabled()
        o_BTHD = (self._decode if is_step else self._prefill)(qkv, state, step)
        o_NI = gated_rms_norm(
            o_BTHD.reshape(B * T, H * D), gate_BTI.flatten(0, 1), self.norm.weight, self.norm.eps
        )
        y_BTE: Tensor = self.out_proj(o_NI.to(gate_BTI.dtype).view(B, T, H * D))
        return y_BTE

    def _prefill(self, qkv_BTH3D: Tensor, state: SequenceState, step: Step) -> Tensor:
        # nothing else reads the projection: without gradients it is overwritten
        active_BTH3D = F.silu(qkv_BTH3D, inplace=not torch.is_grad_enabled())
        q_BTHD, k_BTHD, v_BTHD = torch.split(active_BTH3D, self.config.head_dim, -1)
        o_BTHD, after_BHDD = lightning_rows(
            q_BTHD,
            k_BTHD,
            v_BTHD,
            self.slopes_on(q_BTHD.device),
            state.lightning.get(self.layer),
            step.count_B,
        )
        state.put_lightning(self.layer, after_BHDD)
        return o_BTHD

    def _decode(self, qkv_B1H3D: Tensor, state: SequenceState, step: Step) -> Tensor:
        B, _, H, _ = qkv_B1H3D.shape
        D = self.config.head_dim
        q_BHD, k_BHD, v_BHD = torch.split(qkv_B1H3D[:, 0], D, -1)
        s_BHDD = state.lightning.get(self.layer)
        if s_BHDD is None:
            s_BHDD = torch.zeros(B, H, D, D, dtype=torch.float32, device=qkv_B1H3D.device)
        elif not state.fixed_capacity:
            s_BHDD = s_BHDD.clone(memory_format=torch.contiguous_format)
        slope_H = self.slopes_on(s_BHDD.device)
        o_BHD = lightning_rows_step(
            q_BHD, k_BHD, v_BHD, slope_H, s_BHDD, step.slot_B, silu=True
        )  # fmt: skip
        if not state.fixed_capacity:
            state.lightning[self.layer] = s_BHDD
        return o_BHD.unsqueeze(1)
