"""RMSNorm over all heads of a token, times a sigmoid gate: Triton on CUDA, torch elsewhere.

Shapes: T tokens, I inner (heads x head dim).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from m1serve.kernels.checks import DTYPES, check_devices, check_last_dim

MAX_INNER = 8192
"""Of a CUDA program, which holds a whole token in registers: M1 has 64 heads of 128."""


def gated_rms_norm(x_TI: Tensor, gate_TI: Tensor, weight_I: Tensor, eps: float = 1e-6) -> Tensor:
    """y [T, I] = x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate), in x's dtype.

    bf16, fp16 or fp32 each; computed in fp32 and rounded once. Rows may lie any distance apart.
    Differentiable once in x, gate and weight; the backward is deterministic.
    """
    _check(x_TI, gate_TI, weight_I)
    if not x_TI.is_cuda:
        normed_TI = F.rms_norm(x_TI.float(), weight_I.shape, weight_I.float(), eps)
        return (normed_TI * torch.sigmoid(gate_TI.float())).to(x_TI.dtype)
    from m1serve.kernels.norm_triton import GatedRMSNorm

    if x_TI.shape[1] > MAX_INNER:
        raise ValueError(f"x has {x_TI.shape[1]} values a token, wanted at most {MAX_INNER}")
    with torch.cuda.device(x_TI.device):
        y_TI: Tensor = GatedRMSNorm.apply(x_TI, gate_TI, weight_I, eps)  # type: ignore[no-untyped-call]
    return y_TI


def _check(x_TI: Tensor, gate_TI: Tensor, weight_I: Tensor) -> None:
    if x_TI.dim() != 2 or x_TI.shape[1] == 0:
        raise ValueError(
            f"x has shape {list(x_TI.shape)}, wanted [tokens, inner], inner at least 1"
        )
    if gate_TI.shape != x_TI.shape:
        raise ValueError(
            f"gate has shape {list(gate_TI.shape)}, wanted {list(x_TI.shape)}: that of x"
        )
    if weight_I.shape != x_TI.shape[1:]:
        raise ValueError(f"weight has shape {list(weight_I.shape)}, wanted [{x_TI.shape[1]}]")
    named = {"x": x_TI, "gate": gate_TI, "weight": weight_I}
    for name, tensor in named.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}, wanted one of {DTYPES}")
        check_last_dim(tensor, name)
    check_devices(x_TI.device, **named)
