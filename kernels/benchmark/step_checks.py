"""How exact what runs without gradients is: few tokens' experts, routes and products, fused norms.

Against float64. Shapes: N tokens, E hidden, F inner, X experts, P chosen experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from m1serve.kernels.benchmark.checks import BARS, CheckCase, Setting
from m1serve.kernels.benchmark.inputs import largest_difference, worst_error
from m1serve.kernels.benchmark.layer_checks import EXPERTS_BAR
from m1serve.kernels.linear import fp32_logits, linear
from m1serve.kernels.moe import grouped_experts, route
from m1serve.kernels.residual import Picks, Sum, rms_norm

BF16 = torch.bfloat16
ALPHA, EPS = 3.5565588200778455, 1e-5
# a sum of two rounded terms is rounded, then normed and rounded
NORM_BAR, ROUTE_BAR, LOGITS_BAR = 4e-3, 1e-6, 2e-5


def step_checks(setting: Setting) -> Iterator[CheckCase]:
    def case(op: str, name: str, bar: float, run: partial[float]) -> CheckCase:
        return CheckCase(op=op, case=name, dtype=BF16, bar=bar, run=run)

    for num_tokens in (1, 8, 128):
        name = f"N={num_tokens}, no gradients"
        yield case("moe", name, EXPERTS_BAR, partial(_experts_error, setting, num_tokens))
    yield case("moe", "a token alone and among 9", 0.0, partial(_experts_alone, setting))
    for num_tokens in (1, 33, 65):
        name = f"N={num_tokens}"
        yield case("fp32_logits", name, LOGITS_BAR, partial(_logits_error, setting, num_tokens))
        yield case("linear", name, BARS[BF16], partial(_linear_error, setting, num_tokens))
        yield case("route", name, ROUTE_BAR, partial(_route_error, setting, num_tokens))
        yield case("rms_norm of a sum", name, NORM_BAR, partial(_norm_error, setting, num_tokens))


def _relative(got: Tensor, wanted: Tensor) -> float:
    return worst_error(got[None], wanted[None], head_dim=0)


def _normal(setting: Setting, *shape: int) -> Tensor:
    generator = torch.Generator(setting.device).manual_seed(shape[0])
    return torch.randn(shape, generator=generator, device=setting.device)


def _expert_inputs(setting: Setting, num_tokens: int) -> tuple[Tensor, ...]:
    hidden, inner, num_experts = (1024, 1536, 32) if setting.is_large else (32, 48, 4)
    return (
        _normal(setting, num_tokens, hidden).bfloat16(),
        (_normal(setting, num_experts, 2 * inner, hidden) * hidden**-0.5).bfloat16(),
        (_normal(setting, num_experts, hidden, inner) * inner**-0.5).bfloat16(),
        _normal(setting, num_tokens, 2).sigmoid(),
        _normal(setting, num_tokens, num_experts).topk(2).indices,
    )


@torch.no_grad()
def _experts_error(setting: Setting, num_tokens: int) -> float:
    x, w13, w2, weight, chosen = _expert_inputs(setting, num_tokens)
    wanted = torch.zeros_like(x, dtype=torch.float64)
    for expert in range(len(w2)):
        a, b = (x.double() @ w13[expert].double().T).chunk(2, dim=-1)
        share_N1 = (weight.double() * (chosen == expert)).sum(-1, keepdim=True)
        wanted += share_N1 * ((F.silu(a) * b) @ w2[expert].double().T)
    return _relative(grouped_experts(x, w13, w2, weight, chosen), wanted)


@torch.no_grad()
def _experts_alone(setting: Setting) -> float:
    x, w13, w2, weight, chosen = _expert_inputs(setting, 9)
    together = grouped_experts(x, w13, w2, weight, chosen)
    if not together.is_cuda:
        # the torch loop promises no bits
        return 0.0
    alone = grouped_experts(x[4:5], w13, w2, weight[4:5], chosen[4:5])
    return largest_difference(alone, together[4:5])


def _product_inputs(setting: Setting, num_tokens: int) -> tuple[Tensor, Tensor]:
    num_out, num_in = (24576, 6144) if setting.is_large else (100, 64)
    x_NE = _normal(setting, num_tokens, num_in).bfloat16()
    return x_NE, (_normal(setting, num_out, num_in) * num_in**-0.5).bfloat16()


@torch.no_grad()
def _logits_error(setting: Setting, num_tokens: int) -> float:
    x, weight = _product_inputs(setting, num_tokens)
    return _relative(fp32_logits(x, weight), x.double() @ weight.double().T)


@torch.no_grad()
def _linear_error(setting: Setting, num_tokens: int) -> float:
    x, weight = _product_inputs(setting, num_tokens)
    return _relative(linear(x, weight), x.double() @ weight.double().T)


@torch.no_grad()
def _route_error(setting: Setting, num_tokens: int) -> float:
    """Of the probabilities and of the weights of the experts that were chosen."""
    x, weight = _product_inputs(setting, num_tokens)
    gate = weight[:32].float()
    routes = route(x, gate, 2)
    wanted = torch.softmax(x.double() @ gate.double().T, -1)
    at_NP = wanted.gather(1, routes.chosen_NP)
    shares = at_NP / at_NP.sum(-1, keepdim=True)
    # a token's second choice may be any expert that is as probable
    lost = (wanted.topk(2).values - at_NP).abs().max().item()
    return max(_relative(routes.p_NX, wanted), _relative(routes.weight_NP, shares), lost)


@torch.no_grad()
def _norm_error(setting: Setting, num_tokens: int) -> float:
    hidden = 6144 if setting.is_large else 64
    residual, weight = _normal(setting, num_tokens, hidden), _normal(setting, hidden)
    y_ME = _normal(setting, 2 * num_tokens, hidden).bfloat16()
    residual, weight = residual.bfloat16(), weight.bfloat16()
    place = torch.arange(2 * num_tokens, device=residual.device).flip(0)
    got = rms_norm(Sum(residual, Picks(y_ME, place, 2), ALPHA, 1.0), weight, EPS)
    x = residual.double() * ALPHA + y_ME.double()[place].view(num_tokens, 2, hidden).sum(1)
    return _relative(
        got, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()
    )
