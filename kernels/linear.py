"""Products with a weight: the projections of few tokens, and logits that are fp32 sums.

On CUDA in bf16 without gradients few tokens take a Triton kernel that reads the weight once at the
pace of the memory; the rest is torch.
Shapes: N tokens (any leading dims), E in, O out, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from m1serve.kernels.checks import check_devices
from m1serve.kernels.residual import is_fused

MAX_TOKENS = 64
"""More are torch's, whose tiles are made for them."""


def linear(x: Tensor, weight_OE: Tensor) -> Tensor:
    """x weightᵀ, [..., O] in x's dtype; differentiable.

    Of few tokens on Hopper each stands alone: its bits do not depend on the others.
    """
    return linears(x, [weight_OE])[0]


def linears(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """`linear` of up to three weights [O, E], a result a weight; few tokens take one launch."""
    if not all(_fits(x, weight_OE) for weight_OE in weights):
        return [F.linear(x, weight_OE) for weight_OE in weights]
    from m1serve.kernels.linear_triton import multiply

    return multiply(x, weights, x.dtype)


def fp32_logits(hidden: Tensor, weight_VE: Tensor) -> Tensor:
    """hidden weightᵀ, [..., V] in fp32: operands as stored, products and sums fp32, none rounded.

    On CUDA without gradients bf16 is multiplied by tensor cores, which is exact for its products;
    elsewhere both are raised to fp32 first. Differentiable. ValueError names a wrong shape or
    device.
    """
    if weight_VE.dim() != 2 or hidden.shape[-1:] != weight_VE.shape[1:]:
        raise ValueError(
            f"hidden has shape {list(hidden.shape)} and weight {list(weight_VE.shape)}, wanted "
            "[..., hidden] and [vocabulary, hidden]"
        )
    check_devices(hidden.device, weight=weight_VE)
    if _fits(hidden, weight_VE):
        from m1serve.kernels.linear_triton import multiply

        return multiply(hidden, [weight_VE], torch.float32)[0]
    if is_fused(hidden) and hidden.dtype == weight_VE.dtype == torch.bfloat16:
        flat_NE = hidden.reshape(-1, hidden.shape[-1])
        logits_NV = torch.mm(flat_NE, weight_VE.t(), out_dtype=torch.float32)
        return logits_NV.view(*hidden.shape[:-1], len(weight_VE))
    return F.linear(hidden.float(), weight_VE.float())


def _fits(x: Tensor, weight_OE: Tensor) -> bool:
    """Whether the kernel takes them: bf16 on Hopper, 16-byte rows, few tokens."""
    if not is_fused(x) or not 0 < x.numel() <= MAX_TOKENS * x.shape[-1]:
        return False
    return (
        x.dtype == weight_OE.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(x.device)[0] == 9
        and weight_OE.is_contiguous()
        and not weight_OE.shape[1] % 8
        and not weight_OE.data_ptr() % 16
    )
