"""Lightning attention as the model calls it; the tensor's device decides which kernel runs.

State and decay are fp32 everywhere. Shapes: B rows, T tokens, H heads, D head dim.
"""

from __future__ import annotations

from torch import Tensor

from m1serve.kernels.reference import lightning_chunked, lightning_step_


def lightning_prefill(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHD: Tensor,
    slope_H: Tensor,
    state_BHDD: Tensor | None = None,
    count_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """fp32 outputs [B, T, H, D] and state [B, H, D, D] after each row's first `count_B` tokens.

    No state means zeros, no counts all T. The given state is not modified. Differentiable.
    """
    return lightning_chunked(q_BTHD, k_BTHD, v_BTHD, slope_H, state_BHDD, count_B)


def lightning_decode(
    q_BHD: Tensor,
    k_BHD: Tensor,
    v_BHD: Tensor,
    slope_H: Tensor,
    state_BHDD: Tensor,
    count_B: Tensor | None = None,
) -> Tensor:
    """fp32 outputs [B, H, D] of one token a row.

    The caller's fp32 state is updated in place, except in rows whose count is 0.
    """
    return lightning_step_(q_BHD, k_BHD, v_BHD, slope_H, state_BHDD, count_B)
