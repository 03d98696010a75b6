"""Lightning attention with gradients: three more walks, nothing stored but the inputs.

With S_t = e^-s S_{t-1} + k_t v_t^T and o_t = q_t S_t, the gradients are lightning attention again:
dq walks forwards over (do, v, k), dv backwards over (k, q, do), dk backwards over (v, do, q).
Shapes: T tokens, N sequences, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Walk = Callable[..., None]


def attend(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    slope_H: Tensor,
    initial_NHDD: Tensor | None,
    walk: Walk,
    num_sequences: int,
) -> tuple[Tensor, Tensor]:
    """o [T, H, D] and the fp32 states [N, H, D, D] after the sequences that `walk` knows.

    `walk(q, k, v, o, slope, source, target, reverse=)` walks all of them, sequence n from state n
    of `source` (None: zeros) to state n of `target` (None: not kept).
    """
    outputs: tuple[Tensor, Tensor] = _Attention.apply(  # type: ignore[no-untyped-call]
        q_THD, k_THD, v_THD, slope_H, initial_NHDD, walk, num_sequences
    )
    return outputs


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        slope_H: Tensor,
        initial_NHDD: Tensor | None,
        walk: Walk,
        num_sequences: int,
    ) -> tuple[Tensor, Tensor]:
        o_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        final_NHDD = _states(q_THD, num_sequences)
        walk(q_THD, k_THD, v_THD, o_THD, slope_H, initial_NHDD, final_NHDD)
        ctx.save_for_backward(q_THD, k_THD, v_THD, slope_H, initial_NHDD)
        ctx.walk, ctx.num_sequences = walk, num_sequences
        ctx.set_materialize_grads(False)
        return o_THD, final_NHDD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        do_THD: Tensor | None,
        dfinal_NHDD: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        q_THD, k_THD, v_THD, slope_H, initial_NHDD = ctx.saved_tensors
        needs_q, needs_k, needs_v, _, needs_initial = ctx.needs_input_grad[:5]
        do_THD = torch.zeros_like(q_THD) if do_THD is None else _walkable(do_THD)
        decay_H11 = torch.exp(-slope_H.to(_exact(q_THD.dtype))).view(-1, 1, 1)
        # a walk decays what it starts from once more than the last state was
        later_NHDD = None if dfinal_NHDD is None else dfinal_NHDD / decay_H11
        dq_THD = dk_THD = dv_THD = dinitial_NHDD = None
        if needs_q:
            dq_THD = torch.empty_like(do_THD)
            ctx.walk(do_THD, v_THD, k_THD, dq_THD, slope_H, _transposed(initial_NHDD), None)
        if needs_k:
            dk_THD = torch.empty_like(do_THD)
            later = _transposed(later_NHDD)
            ctx.walk(v_THD, do_THD, q_THD, dk_THD, slope_H, later, None, reverse=True)
        if needs_v or needs_initial:
            dv_THD = torch.empty_like(do_THD)
            first_NHDD = None
            if needs_initial:
                first_NHDD = _states(q_THD, ctx.num_sequences)
            ctx.walk(k_THD, q_THD, do_THD, dv_THD, slope_H, later_NHDD, first_NHDD, reverse=True)
            dinitial_NHDD = None if first_NHDD is None else first_NHDD * decay_H11
        return dq_THD, dk_THD, dv_THD, None, dinitial_NHDD, None, None


def _exact(dtype: torch.dtype) -> torch.dtype:
    """States are fp32, or float64 where the reference computes in it."""
    return dtype if dtype == torch.float64 else torch.float32


def _states(like_THD: Tensor, count: int) -> Tensor:
    _, H, D = like_THD.shape
    return torch.empty(count, H, D, D, dtype=_exact(like_THD.dtype), device=like_THD.device)


def _transposed(state_NHDD: Tensor | None) -> Tensor | None:
    return None if state_NHDD is None else state_NHDD.transpose(-1, -2)


def _walkable(do_THD: Tensor) -> Tensor:
    """Gradients may come expanded: then every token or head would lie at the same address."""
    is_packed = do_THD.stride(-1) == 1 and all(
        step >= do_THD.shape[-1] for step in do_THD.stride()[:2]
    )
    return do_THD if is_packed else do_THD.contiguous()
