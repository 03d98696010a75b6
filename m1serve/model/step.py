"""Step: what every layer of one forward shares.

Shapes: B rows, T tokens, L key columns, R rotary pairs, H heads, K kv heads, D head dim,
Q = (heads of a kv head) * T query rows; b is B, or 1 where all rows are equally long.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from m1serve.kernels.lightning import row_slots
from m1serve.model.config import M1Config


@dataclass(frozen=True, kw_only=True)
class Step:
    pos_BT: Tensor
    """int64 absolute position of each token"""
    count_B: Tensor | None
    """Real tokens of each row, the rest is right padding; None means all T."""
    num_columns: int
    """L: key columns that a query of this step may look at"""
    num_groups: int
    """Query heads of a kv head"""
    pos_bT: Tensor
    cos_b1TR: Tensor
    sin_b1TR: Tensor

    @classmethod
    def build(
        cls, config: M1Config, length_B: Tensor, num_new: int, count_B: Tensor | None, columns: int
    ) -> Step:
        """`columns` is the width of the key buffers once the new tokens are in."""
        device = length_B.device
        length_b = length_B[:1] if length_B.stride(0) == 0 else length_B
        pos_bT = length_b[:, None] + torch.arange(num_new, device=device)
        frequency_R = _frequencies(config.rope_theta, config.rotary_dim, device)
        angle_b1TR = pos_bT[:, None, :, None].float() * frequency_R
        return cls(
            pos_BT=pos_bT.expand(length_B.shape[0], -1),
            count_B=count_B,
            num_columns=columns,
            num_groups=config.num_attention_heads // config.num_key_value_heads,
            pos_bT=pos_bT,
            cos_b1TR=angle_b1TR.cos(),
            sin_b1TR=angle_b1TR.sin(),
        )

    @cached_property
    def slot_B(self) -> Tensor:
        """int64: the row of the lightning states that each row's one token updates, or none."""
        return row_slots(len(self.pos_BT), self.count_B, self.pos_BT.device)

    @cached_property
    def mask_b1QL(self) -> Tensor:
        """True where a query row (head-major) sees a column; stale ones lie past all real queries.

        Made when the first layer asks: a million columns must not have one.
        """
        column_L = torch.arange(self.num_columns, device=self.pos_bT.device)
        mask_b1TL = column_L <= self.pos_bT[:, None, :, None]
        return mask_b1TL.repeat(1, 1, self.num_groups, 1)

    def rotate(self, x_BHTD: Tensor) -> Tensor:
        """NeoX halves within the first 2R channels; the other channels carry no position."""
        R = self.cos_b1TR.shape[-1]
        a, b, rest = x_BHTD[..., :R], x_BHTD[..., R : 2 * R], x_BHTD[..., 2 * R :]
        cos, sin = self.cos_b1TR, self.sin_b1TR
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def place(self, buffer_BKLD: Tensor, new_BTKD: Tensor) -> None:
        """Writes the real tokens at their positions; padding might not fit, so it is left out."""
        B, T = self.pos_BT.shape
        rows_B1 = torch.arange(B, device=self.pos_BT.device)[:, None]
        if self.count_B is None:
            buffer_BKLD[rows_B1, :, self.pos_BT] = new_BTKD.to(buffer_BKLD.dtype)
            return
        is_real_BT = torch.arange(T, device=self.pos_BT.device) < self.count_B[:, None]
        rows, tokens = is_real_BT.nonzero(as_tuple=True)
        buffer_BKLD[rows, :, self.pos_BT[rows, tokens]] = new_BTKD[rows, tokens].to(
            buffer_BKLD.dtype
        )


@lru_cache
def _frequencies(theta: float, rotary_dim: int, device: torch.device) -> Tensor:
    """fp32 [R], made once: five launches of every step otherwise."""
    # whoever asks first, training must be able to save it
    with torch.inference_mode(False):
        pair_R = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float32)
        # MiniMax's own order of rounding: a last bit is 0.03 rad after a million tokens
        return 1.0 / theta ** (pair_R / rotary_dim)
