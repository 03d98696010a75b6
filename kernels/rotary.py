"""Rotary positions on the first channels of queries and keys, in place: for CUDA without gradients.

Shapes: B rows, T tokens, H query heads, K kv heads, D head dim, R rotary pairs; b is B, or 1 where
all rows are equally long.
"""

from __future__ import annotations

from torch import Tensor

from m1serve.kernels.checks import DTYPES, check_devices, check_dtypes, check_last_dim


def rotate_(q_BTHD: Tensor, k_BTKD: Tensor, cos_bTR: Tensor, sin_bTR: Tensor) -> None:
    """Turns NeoX halves within the first 2R channels; the others carry no position.

    Multiplied in fp32 and rounded once. Rows of q and k may lie any distance apart. CUDA only;
    nothing is differentiable. ValueError names a wrong shape, dtype or device.
    """
    _check(q_BTHD, k_BTKD, cos_bTR, sin_bTR)
    from m1serve.kernels.rotary_triton import rotate_in_place

    rotate_in_place(q_BTHD, k_BTKD, cos_bTR, sin_bTR)


def _check(q_BTHD: Tensor, k_BTKD: Tensor, cos_bTR: Tensor, sin_bTR: Tensor) -> None:
    named = {"q": q_BTHD, "k": k_BTKD}
    for name, tensor in named.items():
        if tensor.dim() != 4 or tensor.shape[:2] != q_BTHD.shape[:2]:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, wanted [rows, tokens, heads, dim] as q's "
                f"{list(q_BTHD.shape)}"
            )
        check_last_dim(tensor, name)
        if tensor.shape[1] > 1 and tensor.stride(0) != tensor.shape[1] * tensor.stride(1):
            raise ValueError(f"{name} has strides {list(tensor.stride())}, wanted rows end to end")
    check_dtypes(q_BTHD.dtype, **named)
    B, T = q_BTHD.shape[:2]
    for name, tensor in {"cos": cos_bTR, "sin": sin_bTR}.items():
        R = tensor.shape[-1]
        if list(tensor.shape) not in ([1, T, R], [B, T, R]) or cos_bTR.shape != sin_bTR.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, wanted [1 or {B}, {T}, pairs], cos and "
                "sin alike"
            )
        if tensor.dtype not in DTYPES or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype}, wanted one of {DTYPES}, contiguous")
        for heads, other in named.items():
            if other.shape[-1] < 2 * R:
                raise ValueError(f"{name} turns {2 * R} channels, {heads} has {other.shape[-1]}")
    check_devices(q_BTHD.device, k=k_BTKD, cos=cos_bTR, sin=sin_bTR)
