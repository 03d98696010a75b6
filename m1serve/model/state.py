"""SequenceState: what sequences carry from one forward to the next, batched.

A growing state (training, prefixes) is never modified by a forward.
A fixed-capacity state (sampling, without gradients) is one buffer for good and is updated in place;
serving keeps its keys in pages (`paged`).
Shapes: B rows, H heads, D head dim, K kv heads, L key columns, T tokens. Column i holds position i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from m1serve.model.config import M1Config
from m1serve.model.step import Step


@dataclass(slots=True, kw_only=True)
class SequenceState:
    lightning: dict[int, Tensor]
    """layer -> [B, H, D, D] fp32 (key dim x value dim); a missing layer means zeros"""
    keys: dict[int, Tensor]
    """layer -> [B, K, L, D], rotated"""
    values: dict[int, Tensor]
    """layer -> [B, K, L, D]"""
    length_B: Tensor
    """int64, tokens consumed by each row; stride 0 when all rows are known to be equally long"""
    fixed_capacity: bool = False

    @classmethod
    def empty(cls, num_rows: int, *, device: torch.device | str = "cpu") -> SequenceState:
        """A growing state of rows that have consumed nothing."""
        length_B = torch.zeros(1, dtype=torch.int64, device=device).expand(num_rows)
        return cls(lightning={}, keys={}, values={}, length_B=length_B)

    @classmethod
    def allocate(
        cls,
        config: M1Config,
        num_rows: int,
        capacity: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> SequenceState:
        """A zeroed pool of rows of `capacity` tokens; `dtype` is that of keys and values."""
        H, D, K = config.num_attention_heads, config.head_dim, config.num_key_value_heads

        def key_buffer() -> Tensor:
            return torch.zeros(num_rows, K, capacity, D, dtype=dtype, device=device)

        return cls(
            lightning={
                i: torch.zeros(num_rows, H, D, D, device=device) for i in config.lightning_layers
            },
            keys={i: key_buffer() for i in config.softmax_layers},
            values={i: key_buffer() for i in config.softmax_layers},
            length_B=torch.zeros(num_rows, dtype=torch.int64, device=device),
            fixed_capacity=True,
        )

    @property
    def num_rows(self) -> int:
        return self.length_B.shape[0]

    @property
    def num_tokens(self) -> int:
        """Of the longest row; waits for the device."""
        return int(self.length_B.max())

    @property
    def num_columns(self) -> int:
        """Width of the key buffers: the capacity, or what has been appended so far."""
        return next((t.shape[2] for t in self.keys.values()), 0)

    @property
    def num_bytes(self) -> int:
        groups = (self.lightning, self.keys, self.values)
        return sum(t.numel() * t.element_size() for group in groups for t in group.values())

    def select(self, rows: Tensor, *, columns: int | None = None) -> SequenceState:
        """A copy of some rows, with the first `columns` key columns only if given."""
        part = self._map(lambda t: t.index_select(0, rows), columns=columns)
        part.length_B = self.length_B.index_select(0, rows)
        return part

    def write(self, rows: Tensor, part: SequenceState) -> None:
        """Puts the rows of `part` (its buffers may be narrower) back; fixed capacity only."""
        for layer, t in part.lightning.items():
            self.lightning[layer][rows] = t
        for mine, theirs in ((self.keys, part.keys), (self.values, part.values)):
            for layer, t in theirs.items():
                mine[layer][rows, :, : t.shape[2]] = t
        self.length_B[rows] = part.length_B

    def expand(self, num_rows: int) -> SequenceState:
        """A one-row state as `num_rows` equal rows, without a copy (gradients add up)."""
        state = self._map(lambda t: t.expand(num_rows, *t.shape[1:]))
        state.length_B = self.length_B.expand(num_rows)
        return state

    def with_capacity(self, capacity: int) -> SequenceState:
        """A private fixed-capacity copy whose key buffers hold `capacity` tokens."""
        room = capacity - self.num_columns
        assert room >= 0, f"capacity {capacity} is below the {self.num_columns} columns in use"
        state = self._map(lambda t: t.clone(memory_format=torch.contiguous_format))
        for group in (state.keys, state.values):
            for layer, t in group.items():
                group[layer] = F.pad(t, (0, 0, 0, room))
        state.length_B = self.length_B.clone(memory_format=torch.contiguous_format)
        state.fixed_capacity = True
        return state

    def fork(self) -> SequenceState:
        """The same tensors in a state of its own."""
        return self._map(lambda t: t)

    def put_lightning(self, layer: int, state_BHDD: Tensor) -> None:
        if self.fixed_capacity:
            self.lightning[layer].copy_(state_BHDD)
        else:
            self.lightning[layer] = state_BHDD

    def append(
        self, layer: int, k_BTKD: Tensor, v_BTKD: Tensor, step: Step
    ) -> tuple[Tensor, Tensor]:
        """Stores the step's keys and values; returns all that its queries may see [B, K, L, D]."""
        for group, t_BTKD in ((self.keys, k_BTKD), (self.values, v_BTKD)):
            if self.fixed_capacity:
                step.place(group[layer], t_BTKD)
            elif layer not in group:
                group[layer] = t_BTKD.transpose(1, 2)
            else:
                group[layer] = F.pad(group[layer], (0, 0, 0, t_BTKD.shape[1]))
                step.place(group[layer], t_BTKD)
        end = step.num_columns
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def attend(
        self, layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, step: Step
    ) -> Tensor:
        """Softmax attention [B, T, H, D] over what a row holds and the step's own keys."""
        B, T, _, D = q_BTHD.shape
        k_BKLD, v_BKLD = self.append(layer, k_BTKD, v_BTKD, step)
        # the heads of a group become query rows: SDPA's own grouping copies the keys for each head
        q_BKQD = q_BTHD.transpose(1, 2).reshape(B, k_BKLD.shape[1], -1, D).to(k_BKLD.dtype)
        o_BKQD = F.scaled_dot_product_attention(q_BKQD, k_BKLD, v_BKLD, attn_mask=step.mask_b1QL)
        return o_BKQD.reshape(B, -1, T, D).transpose(1, 2)

    def columns_after(self, num_new: int) -> int:
        """Key columns that the queries of `num_new` further tokens may look at."""
        if self.fixed_capacity:
            return min(self.num_tokens + num_new, self.num_columns)
        return self.num_columns + num_new

    def advance(self, step: Step) -> None:
        added = step.pos_BT.shape[1] if step.count_B is None else step.count_B
        if self.fixed_capacity:
            self.length_B += added
        elif step.count_B is None and self.length_B.stride(0) == 0:
            self.length_B = (self.length_B[:1] + added).expand(self.num_rows)
        else:
            self.length_B = self.length_B + added

    def _map(
        self, change: Callable[[Tensor], Tensor], *, columns: int | None = None
    ) -> SequenceState:
        return SequenceState(
            lightning={i: change(t) for i, t in self.lightning.items()},
            keys={i: change(t[:, :, :columns]) for i, t in self.keys.items()},
            values={i: change(t[:, :, :columns]) for i, t in self.values.items()},
            length_B=self.length_B,
            fixed_capacity=self.fixed_capacity,
        )
