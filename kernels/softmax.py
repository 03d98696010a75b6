"""Causal softmax attention of one sequence's chunk over itself and all of its past, no gradients.

On CUDA in bf16 and fp16 a fused kernel attends to the chunk and to the past, and one pass joins the
two: on Hopper our own (`softmax_hopper`) where it fits, else torch's cuDNN or flash. The rest is
blocked over queries with a mask.
Shapes: T tokens of the chunk, L tokens before it, H query heads, K kv heads, G = H/K, D head dim.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from m1serve.kernels.checks import check_devices, check_dtypes, check_last_dim, check_tensors

BLOCK_SCORES = 1 << 24
"""Scores that the blocked attention holds at once: 64 MiB in fp32, a few times over."""
HOPPER_TOKENS = 128
"""Smaller chunks fill too little of our kernel's tiles."""
CUDNN_TOKENS = 1024
"""Smaller chunks take flash: cuDNN plans each new pair of lengths, which takes the host longer."""
CUDNN_VERSION = 91501
"""Earlier ones are wrong for lengths that 128 does not divide (pytorch/pytorch#169849)."""
PAST_TOKENS = 1 << 20
"""Of the past in one call: offsets within it stay below 2^31 at eight kv heads of 128."""


@dataclass(frozen=True, slots=True)
class Part:
    """Attention to some of the keys, and the log-sum-exp of its scaled scores."""

    o_THD: Tensor
    lse_HT: Tensor


class Attend(Protocol):
    """Attention of q [1, H, T, D] to k and v [1, K, L, D], causal or to all of them."""

    def __call__(
        self, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, *, is_causal: bool
    ) -> Part: ...


def prefill_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    past_k_KLD: Tensor | None = None,
    past_v_KLD: Tensor | None = None,
) -> Tensor:
    """o [T, H, D] in q's dtype: a token attends to all of the past and to the chunk up to itself.

    One dtype of bf16, fp16 and fp32, one device, any strides but 1 along D; scale 1/sqrt(D), fp32
    inside. Past keys and values are [K, L, D] (`paged.paged_gather`), both or neither. ValueError
    names a wrong shape, dtype or device.
    """
    _check(q_THD, k_TKD, v_TKD, past_k_KLD, past_v_KLD)
    if not q_THD.numel():
        return torch.empty_like(q_THD)
    with torch.no_grad():
        if _is_fused(*(t.transpose(0, 1)[None] for t in (q_THD, k_TKD, v_TKD))):
            return in_parts(q_THD, k_TKD, v_TKD, past_k_KLD, past_v_KLD, _fused)
        return _blocked(q_THD, k_TKD, v_TKD, past_k_KLD, past_v_KLD)


def in_parts(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    past_k_KLD: Tensor | None,
    past_v_KLD: Tensor | None,
    attend: Attend,
    *,
    past_tokens: int = PAST_TOKENS,
) -> Tensor:
    """`prefill_attention` of checked inputs: the chunk, then pieces of its past, joined into it."""
    q_1HTD, k_1KTD, v_1KTD = (t.transpose(0, 1)[None] for t in (q_THD, k_TKD, v_TKD))
    joined = attend(q_1HTD, k_1KTD, v_1KTD, is_causal=True)
    if past_k_KLD is not None and past_v_KLD is not None and past_k_KLD.shape[1]:
        from m1serve.kernels.softmax_triton import join_

        pieces = (t_KLD.split(past_tokens, 1) for t_KLD in (past_k_KLD, past_v_KLD))
        for k_KLD, v_KLD in zip(*pieces, strict=True):
            join_(joined, attend(q_1HTD, k_KLD[None], v_KLD[None], is_causal=False))
    return joined.o_THD


def _is_fused(q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor) -> bool:
    """Whether torch's flash kernel takes them: bf16 or fp16 on CUDA, D a multiple of 8 to 256."""
    return (
        q_1HTD.is_cuda
        and not q_1HTD.shape[-1] % 8
        and can_use_flash_attention(_params(q_1HTD, k_1KTD, v_1KTD, True))
    )


def _fused(q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, *, is_causal: bool) -> Part:
    """By our kernel, by cuDNN where that is right and pays, or by flash; no kv head is repeated."""
    shortest = min(q_1HTD.shape[2], k_1KTD.shape[2])
    by = by_flash
    if shortest >= HOPPER_TOKENS and _fits_hopper(q_1HTD, k_1KTD, v_1KTD):
        by = by_hopper
    elif shortest >= CUDNN_TOKENS and _has_cudnn(q_1HTD, k_1KTD, v_1KTD, is_causal):
        by = by_cudnn
    return by(q_1HTD, k_1KTD, v_1KTD, is_causal=is_causal)


def by_hopper(q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, *, is_causal: bool) -> Part:
    from m1serve.kernels.softmax_hopper import attend

    q_THD, k_LKD, v_LKD = (t[0].transpose(0, 1) for t in (q_1HTD, k_1KTD, v_1KTD))
    return Part(*attend(q_THD, k_LKD, v_LKD, is_causal=is_causal))


def by_cudnn(q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, *, is_causal: bool) -> Part:
    o_1HTD, lse_1HT1, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_1HTD, k_1KTD, v_1KTD, None, True, 0.0, is_causal, False
    )
    return Part(o_1HTD[0].transpose(0, 1), lse_1HT1.reshape(lse_1HT1.shape[1:3]))


def by_flash(q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, *, is_causal: bool) -> Part:
    o_1HTD, lse_1HT, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q_1HTD, k_1KTD, v_1KTD, 0.0, is_causal, False
    )
    return Part(o_1HTD[0].transpose(0, 1), lse_1HT[0])


def _fits_hopper(*tensors_1HTD: Tensor) -> bool:
    try:
        from m1serve.kernels import hopper
    except (ImportError, AttributeError):  # a triton without Gluon, or with another Gluon
        return False
    return hopper.fits(*(t[0].transpose(0, 1) for t in tensors_1HTD))


def _has_cudnn(q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, is_causal: bool) -> bool:
    return (torch.backends.cudnn.version() or 0) >= CUDNN_VERSION and can_use_cudnn_attention(
        _params(q_1HTD, k_1KTD, v_1KTD, is_causal)
    )


def _params(q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, is_causal: bool) -> SDPAParams:
    is_grouped = q_1HTD.shape[1] != k_1KTD.shape[1]
    return SDPAParams(q_1HTD, k_1KTD, v_1KTD, None, 0.0, is_causal, is_grouped)


def _blocked(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    past_k_KLD: Tensor | None,
    past_v_KLD: Tensor | None,
) -> Tensor:
    """For every device, dtype and head dim: so many queries at a time that scores stay few."""
    (T, H, D), K = q_THD.shape, k_TKD.shape[1]
    L = 0 if past_k_KLD is None else past_k_KLD.shape[1]
    k_KSD, v_KSD = _whole(past_k_KLD, k_TKD), _whole(past_v_KLD, v_TKD)
    # the query heads of a kv head are queries of the same token: no head's keys are repeated
    q_KTGD = q_THD.unflatten(1, (K, H // K)).transpose(0, 1)
    o_THD = torch.empty(T, H, D, dtype=q_THD.dtype, device=q_THD.device)
    if not L and H * T * T <= BLOCK_SCORES:
        q_HTD = q_THD.transpose(0, 1).float()
        o_1HTD = F.scaled_dot_product_attention(
            q_HTD[None], k_KSD[None], v_KSD[None], is_causal=True, enable_gqa=True
        )
        return o_THD.copy_(o_1HTD[0].transpose(0, 1))
    step = max(1, min(T, BLOCK_SCORES // (H * (L + T))))
    for first in range(0, T, step):
        last = min(first + step, T)
        q_KXD = q_KTGD[:, first:last].reshape(K, -1, D).float()
        token_X = torch.arange(first, last, device=q_THD.device).repeat_interleave(H // K)
        key_S = torch.arange(L + last, device=q_THD.device) - L
        o_KXD = F.scaled_dot_product_attention(
            q_KXD[None],
            k_KSD[None, :, : L + last],
            v_KSD[None, :, : L + last],
            attn_mask=key_S <= token_X[:, None],
        )[0]
        o_KTGD = o_KXD.view(K, last - first, H // K, D)
        o_THD[first:last] = o_KTGD.transpose(0, 1).reshape(last - first, H, D)
    return o_THD


def _whole(past_KLD: Tensor | None, chunk_TKD: Tensor) -> Tensor:
    """Past and chunk as one [K, L + T, D] in fp32."""
    parts = [] if past_KLD is None else [past_KLD.float()]
    return torch.cat([*parts, chunk_TKD.transpose(0, 1).float()], 1)


def _check(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    past_k_KLD: Tensor | None,
    past_v_KLD: Tensor | None,
) -> None:
    named = {"q": q_THD, "k": k_TKD, "v": v_TKD}
    if (past_k_KLD is None) != (past_v_KLD is None):
        raise ValueError("one of past_k and past_v is missing, wanted both or neither")
    if past_k_KLD is not None and past_v_KLD is not None:
        named |= {"past_k": past_k_KLD, "past_v": past_v_KLD}
    check_tensors(**named)
    for name, tensor in named.items():
        if tensor.dim() != 3:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, wanted three dims")
        check_last_dim(tensor, name)
    (T, H, D), K = q_THD.shape, k_TKD.shape[1]
    if not K or not H or H % K:
        raise ValueError(f"q has {H} heads and k {K}, wanted a multiple of k's")
    wanted = {"k": [T, K, D], "v": [T, K, D]}
    if past_k_KLD is not None:
        wanted["past_k"] = wanted["past_v"] = [K, past_k_KLD.shape[1], D]
    for name, shape in wanted.items():
        if list(named[name].shape) != shape:
            raise ValueError(f"{name} has shape {list(named[name].shape)}, wanted {shape}")
    check_dtypes(q_THD.dtype, **named)
    check_devices(q_THD.device, **named)
