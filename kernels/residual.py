"""The residual stream between a layer's parts: branches added and normed in one pass on CUDA.

Without gradients on CUDA a pass is one Triton kernel; elsewhere it is the torch operations whose
roundings the kernels keep. Shapes: N tokens (any leading dims), E hidden, P picks a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from m1serve.kernels.checks import DTYPES, check_devices

MAX_HIDDEN = 16384
"""Of a CUDA program, which holds a whole token in registers; wider ones take torch."""


class Picks(NamedTuple):
    """What the experts gave for each pick of N tokens, not yet added a token."""

    y_ME: Tensor
    """[N*P, E]"""
    place_M: Tensor | None
    """int64, the row of pick n*P + p; None where rows lie in that order."""
    num_chosen: int

    def total(self) -> Tensor:
        """[N, E]: each token's picks added in fp32, in order, and rounded once."""
        if is_fused(self.y_ME):
            from m1serve.kernels.residual_triton import sum_picks

            return sum_picks(self.y_ME, self.place_M, self.num_chosen)
        y_ME = self.y_ME if self.place_M is None else self.y_ME.index_select(0, self.place_M)
        return y_ME.view(-1, self.num_chosen, y_ME.shape[1]).sum(1)


class Sum(NamedTuple):
    """residual * alpha + branch * beta, not yet added: the norm that reads it next adds it."""

    residual: Tensor
    """[..., E]"""
    branch: Tensor | Picks
    """As the residual, or picks of as many tokens."""
    alpha: float
    beta: float

    def total(self) -> Tensor:
        """As the residual; differentiable."""
        branch = self.branch
        if isinstance(branch, Picks):
            branch = branch.total().view_as(self.residual)
        return self.residual * self.alpha + branch * self.beta


class Normed(NamedTuple):
    x: Tensor
    """What was normed."""
    normed: Tensor


def is_fused(t: Tensor) -> bool:
    """On CUDA, where no gradient is recorded, in a dtype that the kernels know."""
    return t.is_cuda and not torch.is_grad_enabled() and t.dtype in DTYPES


def rms_norm(x: Tensor | Sum, weight_E: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, [..., E] in the weight's dtype.

    Statistics and product are fp32, the result is rounded once; a sum's terms are rounded to the
    residual's dtype as torch rounds them. Differentiable. ValueError names a wrong shape, dtype or
    device.
    """
    first = _check(x, weight_E)
    if _has_kernel(first):
        from m1serve.kernels.residual_triton import fused_norm

        return fused_norm(x, weight_E, eps, keeps_sum=False).normed
    return _in_torch(x.total() if isinstance(x, Sum) else x, weight_E, eps)


def rms_norm_of_sum(x: Tensor | Sum, weight_E: Tensor, eps: float) -> Normed:
    """As `rms_norm`, and what was normed: the residual of a layer without post-norm."""
    first = _check(x, weight_E)
    if not isinstance(x, Sum):
        return Normed(x, rms_norm(x, weight_E, eps))
    if _has_kernel(first):
        from m1serve.kernels.residual_triton import fused_norm

        return fused_norm(x, weight_E, eps, keeps_sum=True)
    total = x.total()
    return Normed(total, _in_torch(total, weight_E, eps))


def swiglu_weighted(h_M2F: Tensor, weight_M1: Tensor) -> Tensor:
    """silu(first half) * second half * weight, [M, F] in h's dtype, rounded after each step."""
    if is_fused(h_M2F) and h_M2F.is_contiguous() and weight_M1.is_contiguous():
        from m1serve.kernels.residual_triton import swiglu

        return swiglu(h_M2F, weight_M1)
    a_MF, b_MF = h_M2F.chunk(2, -1)
    return F.silu(a_MF).mul_(b_MF).mul_(weight_M1)


def _in_torch(x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    normed = F.rms_norm(x.float(), weight_E.shape, weight_E.float(), eps)
    return normed.to(weight_E.dtype)


def _has_kernel(x: Tensor) -> bool:
    return is_fused(x) and 0 < x.shape[-1] <= MAX_HIDDEN


def _check(x: Tensor | Sum, weight_E: Tensor) -> Tensor:
    """The tensor whose shape and dtype the result of the sum has."""
    first = x.residual if isinstance(x, Sum) else x
    if weight_E.dim() != 1 or first.shape[-1:] != weight_E.shape:
        raise ValueError(
            f"x has shape {list(first.shape)} and weight {list(weight_E.shape)}, wanted "
            "[..., hidden] and [hidden]"
        )
    named = {"weight": weight_E}
    if isinstance(x, Sum):
        named |= _check_branch(first, x.branch)
    check_devices(first.device, **named)
    return first


def _check_branch(residual: Tensor, branch: Tensor | Picks) -> dict[str, Tensor]:
    """Its tensors by name."""
    if not isinstance(branch, Picks):
        if branch.shape != residual.shape:
            raise ValueError(
                f"branch has shape {list(branch.shape)}, wanted {list(residual.shape)} as residual"
            )
        return {"branch": branch}
    y_ME, place_M, num_chosen = branch
    E = residual.shape[-1]
    num_picks = residual.numel() // max(E, 1) * num_chosen
    if list(y_ME.shape) != [num_picks, E]:
        raise ValueError(
            f"picks have shape {list(y_ME.shape)}, wanted {[num_picks, E]}: {num_chosen} a token "
            f"of x {list(residual.shape)}"
        )
    return {"picks": y_ME} if place_M is None else {"picks": y_ME, "place": place_M}
