"""Our own operators behind the interface that the peers are measured through.

Shapes: T tokens, N sequences, B rows, H heads, D head dim, S slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from m1serve.kernels.benchmark.inputs import Answer, Sequences
from m1serve.kernels.benchmark.peers import Peer
from m1serve.kernels.benchmark.report import OURS
from m1serve.kernels.lightning import lightning_attention, lightning_decode, lightning_prefill

ANY_LENGTH = 1 << 30


class M1serve(Peer):
    """Views of the packed qkv go in as they are; states stay in the pool."""

    name = OURS
    longest: ClassVar[dict[str, int]] = dict.fromkeys(("prefill", "training", "decode"), ANY_LENGTH)

    def prefill(self, sequences: Sequences) -> Callable[[], Answer]:
        """Outputs and final states start as NaN, so that what is not written shows."""
        num_sequences, q_THD = sequences.num_sequences, sequences.q_THD
        _, num_heads, head_dim = q_THD.shape
        pool_shape = (2 * num_sequences, num_heads, head_dim, head_dim)
        pool_SHDD = torch.full(pool_shape, float("nan"), device=q_THD.device)
        out_THD = torch.full(q_THD.shape, float("nan"), dtype=q_THD.dtype, device=q_THD.device)
        initial_slots = None
        if sequences.state_NHDD is not None:
            pool_SHDD[num_sequences:] = sequences.state_NHDD
            initial_slots = list(range(num_sequences, 2 * num_sequences))
        final_slots = list(range(num_sequences))

        def call() -> Answer:
            o_THD = lightning_prefill(
                q_THD,
                sequences.k_THD,
                sequences.v_THD,
                sequences.slope_H,
                cu_seqlens=sequences.cu_seqlens,
                pool_SHDD=pool_SHDD,
                initial_slots=initial_slots,
                final_slots=final_slots,
                out_THD=out_THD,
            )
            return Answer(o_THD, pool_SHDD[:num_sequences])

        return call

    def training(self, sequences: Sequences, do_THD: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        inputs = [
            t.detach().requires_grad_() for t in (sequences.q_THD, sequences.k_THD, sequences.v_THD)
        ]

        def call() -> tuple[Tensor, ...]:
            o_THD, _ = lightning_attention(
                inputs[0],
                inputs[1],
                inputs[2],
                sequences.slope_H,
                cu_seqlens=sequences.cu_seqlens,
            )
            return torch.autograd.grad(o_THD, inputs, do_THD)

        return call

    def decode(
        self, qkv_BHX: Tensor, slope_H: Tensor, pool_SHDD: Tensor, slot_B: Tensor
    ) -> Callable[[], Tensor]:
        q_BHD, k_BHD, v_BHD = qkv_BHX.chunk(3, dim=-1)
        out_BHD = torch.full(q_BHD.shape, float("nan"), dtype=q_BHD.dtype, device=q_BHD.device)

        def call() -> Tensor:
            return lightning_decode(
                q_BHD, k_BHD, v_BHD, slope_H, pool_SHDD, slot_B, out_BHD=out_BHD
            )

        return call
