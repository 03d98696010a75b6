"""Mixture of experts: fp32 router, SwiGLU experts, each token through its top P, none dropped.

Shapes: N tokens, E hidden, F ff of one expert, X experts, P experts per token. A pick is one
(token, expert) pair.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from m1serve.kernels.checks import check_devices
from m1serve.kernels.linear import fp32_logits
from m1serve.kernels.moe_sorted import Grouped, grouped_picks, looped_picks
from m1serve.kernels.residual import Picks, is_fused

MAX_ROUTED = 256
"""Tokens that a kernel of its own routes on CUDA: a decode step's."""
MIN_LOOPED_PICKS = 1024
"""An expert's on average, from which on a product of its own fills the GPU."""
_DENSE_ELEMENTS = 1 << 28
"""Every expert on every token, which never waits for the device, up to this many [X, N, 2F]."""


class Routes(NamedTuple):
    weight_NP: Tensor
    """fp32; a token's weights sum to 1."""
    chosen_NP: Tensor
    """int64 experts, the most probable first."""
    p_NX: Tensor
    """fp32 probabilities before the choice, for the balance loss."""


def route(x_NE: Tensor, gate_weight_XE: Tensor, num_chosen: int) -> Routes:
    """Softmax over all experts, the top `num_chosen` renormalised; fp32 under autocast too.

    On CUDA without gradients a kernel chooses, where of equally probable experts the lower comes
    first; which one torch takes is not promised.
    """
    num_experts = gate_weight_XE.shape[0]
    if not 1 <= num_chosen <= num_experts:
        raise ValueError(f"num_chosen is {num_chosen}, wanted 1 to {num_experts}, the experts")
    if is_fused(x_NE):
        from m1serve.kernels.router_triton import choose, few_logits

        of = few_logits if x_NE.shape[0] <= MAX_ROUTED else many_logits
        return Routes(*choose(of(x_NE, gate_weight_XE), num_chosen))
    with torch.autocast(x_NE.device.type, enabled=False):
        p_NX = torch.softmax(F.linear(x_NE.float(), gate_weight_XE.float()), -1)
    weight_NP, chosen_NP = p_NX.topk(num_chosen, -1)
    return Routes(weight_NP / weight_NP.sum(-1, keepdim=True), chosen_NP, p_NX)


def many_logits(x_NE: Tensor, gate_XE: Tensor) -> Tensor:
    """x gateᵀ, fp32 [N, X], without an fp32 copy of bf16 tokens.

    An fp32 weight is the sum of three bf16 ones, whose products with bf16 are exact.
    """
    with torch.autocast(x_NE.device.type, enabled=False):
        if (x_NE.dtype, gate_XE.dtype) != (torch.bfloat16, torch.float32):
            return F.linear(x_NE.float(), gate_XE.float())
        pieces, rest_XE = [], gate_XE
        for _ in range(3):
            pieces.append(rest_XE.bfloat16())
            rest_XE = rest_XE - pieces[-1].float()
        logits_N3X = fp32_logits(x_NE, torch.cat(pieces)).view(len(x_NE), 3, -1)
        # the small ones first
        return logits_N3X[:, 2] + logits_N3X[:, 1] + logits_N3X[:, 0]


def routed_experts(
    x_NE: Tensor, gate_XE: Tensor, w13_X2FE: Tensor, w2_XEF: Tensor, num_chosen: int
) -> Tensor | Picks:
    """`experts` of the experts that `route` chooses; one token's choose themselves, on Hopper."""
    if len(x_NE) == 1 and is_fused(x_NE) and _has_grouped_mm(x_NE, w13_X2FE, w2_XEF):
        from m1serve.kernels.moe_single import one_token_picks
        from m1serve.kernels.router_triton import few_logits

        logits_1X = few_logits(x_NE, gate_XE)
        return Picks(
            one_token_picks(x_NE, w13_X2FE, w2_XEF, logits_1X, num_chosen), None, num_chosen
        )
    weight_NP, chosen_NP, _ = route(x_NE, gate_XE, num_chosen)
    return experts(x_NE, w13_X2FE, w2_XEF, weight_NP, chosen_NP)


def grouped_experts(
    x_NE: Tensor, w13_X2FE: Tensor, w2_XEF: Tensor, weight_NP: Tensor, chosen_NP: Tensor
) -> Tensor:
    """Sum over P of weight * w2 (silu(w1 x) * w3 x), as x; differentiable but for the choice.

    x and the weights of the experts share a dtype (under autocast they need not), `weight_NP` is
    any float, `chosen_NP` int64 in [0, X): not checked on CUDA, where that would wait. Nothing
    given is modified. ValueError names a wrong shape, dtype or device.

    bf16 on Hopper runs torch's grouped matmul, or without gradients and for few tokens a kernel
    that reads only the weights of experts that were chosen. Neither waits for the device, so they
    can be captured in a CUDA graph; sums have a fixed order, so the same call gives the same bits;
    a token's result depends on the others through their number alone, which picks the tiles.
    Without gradients tens of thousands of tokens, unless captured, wait once for their counts and
    take a product an expert, in the memory of one expert's tokens. Other CUDA tensors run every
    expert on every token while that is small. The rest, CPU included, runs each expert on its
    tokens: the number of an expert's tokens may change last bits there.
    """
    mixed = experts(x_NE, w13_X2FE, w2_XEF, weight_NP, chosen_NP)
    return mixed.total() if isinstance(mixed, Picks) else mixed


def experts(
    x_NE: Tensor, w13_X2FE: Tensor, w2_XEF: Tensor, weight_NP: Tensor, chosen_NP: Tensor
) -> Tensor | Picks:
    """As `grouped_experts`; its terms where a kernel left them apart and no gradient is wanted.

    What reads them next adds them in its own pass (`residual.Sum`).
    """
    _check(x_NE, w13_X2FE, w2_XEF, weight_NP, chosen_NP)
    if not x_NE.shape[0]:
        return x_NE.clone()
    if _has_grouped_mm(x_NE, w13_X2FE, w2_XEF):
        if not torch.is_grad_enabled():
            return _picks(x_NE, w13_X2FE, w2_XEF, weight_NP, chosen_NP)
        out_NE: Tensor = Grouped.apply(  # type: ignore[no-untyped-call]
            x_NE, w13_X2FE, w2_XEF, weight_NP, chosen_NP
        )
        return out_NE
    is_small = w13_X2FE.shape[0] * x_NE.shape[0] * w13_X2FE.shape[1] <= _DENSE_ELEMENTS
    run = dense if x_NE.is_cuda and is_small else looped
    return run(x_NE, w13_X2FE, w2_XEF, weight_NP, chosen_NP)


def _picks(
    x_NE: Tensor, w13_X2FE: Tensor, w2_XEF: Tensor, weight_NP: Tensor, chosen_NP: Tensor
) -> Picks:
    """On Hopper in bf16."""
    from m1serve.kernels.moe_decode import MAX_PICKS, expert_picks

    if chosen_NP.numel() <= MAX_PICKS:
        with torch.cuda.device_of(x_NE):  # type: ignore[no-untyped-call]
            y_ME = expert_picks(x_NE, w13_X2FE, w2_XEF, weight_NP, chosen_NP)
        return Picks(y_ME, None, chosen_NP.shape[1])
    is_large = chosen_NP.numel() >= MIN_LOOPED_PICKS * len(w2_XEF)
    if is_large and not torch.cuda.is_current_stream_capturing():
        return looped_picks(x_NE, w13_X2FE, w2_XEF, weight_NP, chosen_NP)
    y_ME, place_M, *_ = grouped_picks(x_NE, w13_X2FE, w2_XEF, weight_NP, chosen_NP)
    return Picks(y_ME, place_M, chosen_NP.shape[1])


def _check(
    x_NE: Tensor, w13_X2FE: Tensor, w2_XEF: Tensor, weight_NP: Tensor, chosen_NP: Tensor
) -> None:
    named = {"x": x_NE, "w13": w13_X2FE, "w2": w2_XEF, "weight": weight_NP, "chosen": chosen_NP}
    for name, num_dims in {"x": 2, "w13": 3, "w2": 3, "weight": 2, "chosen": 2}.items():
        if named[name].dim() != num_dims:
            raise ValueError(f"{name} has shape {list(named[name].shape)}, wanted {num_dims} dims")
    N, E = x_NE.shape
    X, ff = w2_XEF.shape[0], w2_XEF.shape[2]
    shapes = {"w2": [X, E, ff], "w13": [X, 2 * ff, E], "chosen": [N, chosen_NP.shape[1]]}
    shapes["weight"] = shapes["chosen"]
    for name, wanted in shapes.items():
        if list(named[name].shape) != wanted:
            raise ValueError(
                f"{name} has shape {list(named[name].shape)}, wanted {wanted} for x "
                f"{[N, E]}, w2 {list(w2_XEF.shape)} and chosen {list(chosen_NP.shape)}"
            )
    if not 1 <= chosen_NP.shape[1] <= X:
        raise ValueError(f"chosen names {chosen_NP.shape[1]} experts a token, wanted 1 to {X}")
    if chosen_NP.dtype != torch.int64:
        raise ValueError(f"chosen is {chosen_NP.dtype}, wanted torch.int64")
    if not weight_NP.is_floating_point():
        raise ValueError(f"weight is {weight_NP.dtype}, wanted a floating dtype")
    is_autocast = torch.is_autocast_enabled(x_NE.device.type)
    for name in ("x", "w13", "w2"):
        dtype = named[name].dtype
        if not dtype.is_floating_point or (dtype != w2_XEF.dtype and not is_autocast):
            raise ValueError(f"{name} is {dtype}, wanted one floating dtype; w2's {w2_XEF.dtype}")
    check_devices(x_NE.device, **named)


def _has_grouped_mm(x_NE: Tensor, w13_X2FE: Tensor, w2_XEF: Tensor) -> bool:
    """Whether torch has a kernel that neither waits for the device nor falls back to a loop.

    On Blackwell it gives experts without tokens wrong weight gradients (pytorch issue 172439).
    """
    if not (x_NE.is_cuda and torch.cuda.get_device_capability(x_NE.device)[0] == 9):
        return False
    weights = (w13_X2FE, w2_XEF)
    return all(t.dtype == torch.bfloat16 for t in (x_NE, *weights)) and all(
        # rows of 16-byte multiples from a 16-byte aligned start
        w.is_contiguous() and not w.data_ptr() % 16 and not w.shape[-1] % 8
        for w in weights
    )


def dense(
    x_NE: Tensor, w13_X2FE: Tensor, w2_XEF: Tensor, weight_NP: Tensor, chosen_NP: Tensor
) -> Tensor:
    """Every expert on every token, weight 0 where it was not chosen: X/P times the work."""
    mix_NX = weight_NP.new_zeros(x_NE.shape[0], w2_XEF.shape[0]).scatter(1, chosen_NP, weight_NP)
    a_XNF, b_XNF = torch.matmul(x_NE, w13_X2FE.transpose(1, 2)).chunk(2, -1)
    inner_XNF = F.silu(a_XNF) * b_XNF * mix_NX.t().unsqueeze(-1).to(a_XNF.dtype)
    return torch.matmul(inner_XNF, w2_XEF.transpose(1, 2)).sum(0)


def looped(
    x_NE: Tensor, w13_X2FE: Tensor, w2_XEF: Tensor, weight_NP: Tensor, chosen_NP: Tensor
) -> Tensor:
    """Each expert on its own tokens; waits for the counts, and checks them."""
    (X, _, _), P = w2_XEF.shape, chosen_NP.shape[1]
    lowest, highest = (int(bound) for bound in torch.aminmax(chosen_NP))
    if lowest < 0 or highest >= X:
        raise ValueError(f"chosen holds {lowest} to {highest}, wanted experts from 0 to {X - 1}")
    out_NE = torch.zeros_like(x_NE)
    order_M = chosen_NP.flatten().argsort(stable=True)
    counts = torch.bincount(chosen_NP.flatten(), minlength=X).tolist()
    # unbind, not indexing: its backward writes each expert's gradient once
    experts = zip(torch.split(order_M, counts), w13_X2FE.unbind(), w2_XEF.unbind(), strict=True)
    for picks, w13_2FE, w2_EF in experts:
        if not picks.numel():
            continue
        token = picks // P
        a, b = F.linear(x_NE.index_select(0, token), w13_2FE).chunk(2, -1)
        weight = weight_NP.flatten().index_select(0, picks).unsqueeze(-1)
        y = F.linear(F.silu(a) * b, w2_EF) * weight.to(x_NE.dtype)
        out_NE.index_add_(0, token, y)
    return out_NE
