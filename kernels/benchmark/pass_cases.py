"""The timed cases of what a prefill's layers do between products: each pass, at 64K tokens.

A floor is each value read once and written once.
Shapes: T tokens, E hidden, F inner, M = T*P picks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from m1serve.kernels.benchmark.cases import Case, K
from m1serve.kernels.benchmark.inputs import HEAD_DIM, NUM_HEADS
from m1serve.kernels.benchmark.layer_cases import (
    HIDDEN,
    INNER,
    NORM_NAME,
    NUM_CHOSEN,
    NUM_EXPERTS,
    UNFUSED,
    case_of,
    normal,
    row_of,
)
from m1serve.kernels.benchmark.report import OURS, Report, Row
from m1serve.kernels.benchmark.step_cases import GROUPED
from m1serve.kernels.benchmark.timing import cold_ms
from m1serve.kernels.moe import route
from m1serve.kernels.moe_sorted import grouped_picks, looped_picks
from m1serve.kernels.residual import Picks, Sum, rms_norm, swiglu_weighted

TOKENS = 64 * K
EXPERT_TOKENS = (8 * K, 16 * K, 32 * K, TOKENS)
NUM_PICKS = TOKENS * NUM_CHOSEN
ALPHA, EPS = 3.5565588200778455, 1e-5
NORM, NORM_OF_PICKS, SWIGLU, GATHER, SILU, ROUTE = (
    f"{name} T={TOKENS}"
    for name in (
        "norm of a sum",
        "norm of a sum of picks",
        "swiglu",
        "gather",
        "silu in place",
        "route",
    )
)
EVERY_LAYER = (NORM, NORM_OF_PICKS, SWIGLU, GATHER, ROUTE)
OP = "elementwise"
LAYERS, LIGHTNING_LAYERS = 8, 7
"""Of the slice of M1 that a GPU holds."""


def pass_cases() -> Iterator[Case]:
    for impl, is_fused in ((OURS, True), (UNFUSED, False)):
        for name, run in (
            (NORM, partial(_norm, False)),
            (NORM_OF_PICKS, partial(_norm, True)),
            (SWIGLU, _swiglu),
            (ROUTE, _route),
        ):
            yield case_of(OP, name, impl, partial(_in_mode, run, is_fused))
    for num_tokens in EXPERT_TOKENS:
        for impl, experts in ((OURS, looped_picks), (GROUPED, grouped_picks)):
            run_experts = partial(_experts, experts, num_tokens)
            yield case_of("moe_prefill", experts_name(num_tokens), impl, run_experts)
    yield case_of(OP, GATHER, OURS, _gather)
    yield case_of(OP, SILU, OURS, _silu)


def experts_name(num_tokens: int) -> str:
    return f"T={num_tokens} of {NUM_EXPERTS} experts top {NUM_CHOSEN}, terms apart"


@torch.no_grad()
def _experts(
    experts: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], object], num_tokens: int
) -> Row:
    """Sort, gather, both products and SwiGLU, without gradients; the floor is the products'."""
    x = normal(num_tokens, HIDDEN)
    w13 = normal(NUM_EXPERTS, 2 * INNER, HIDDEN).mul_(HIDDEN**-0.5)
    w2 = normal(NUM_EXPERTS, HIDDEN, INNER).mul_(INNER**-0.5)
    chosen = torch.rand(num_tokens, NUM_EXPERTS, device="cuda").topk(NUM_CHOSEN).indices
    weight = torch.rand(num_tokens, NUM_CHOSEN, device="cuda")
    ms = cold_ms(lambda: experts(x, w13, w2, weight, chosen), spend_ms=600)
    return row_of(ms=ms, num_flops=6 * num_tokens * NUM_CHOSEN * HIDDEN * INNER)


def slice_ms(report: Report) -> float | None:
    """All passes of the slice's layers; None while one of them is not measured."""
    per_layer = [report.time_of(OP, name) for name in EVERY_LAYER]
    of_lightning = [report.time_of(OP, SILU), report.time_of("gated_rms_norm", NORM_NAME)]
    total = 0.0
    for times, layers in ((per_layer, LAYERS), (of_lightning, LIGHTNING_LAYERS)):
        for ms in times:
            if ms is None:
                return None
            total += layers * ms
    return total


def _in_mode(run: Callable[[], Row], is_fused: bool) -> Row:
    """Without gradients the kernels run; with them, torch's operations, whose backward is not."""
    with torch.set_grad_enabled(not is_fused):
        return run()


def _norm(has_picks: bool) -> Row:
    """Reads the residual and the branch, or its picks, and writes what was normed."""
    residual, weight = normal(TOKENS, HIDDEN), normal(HIDDEN)
    branch: Tensor | Picks = normal(TOKENS, HIDDEN)
    if has_picks:
        branch = Picks(normal(NUM_PICKS, HIDDEN), _places(), NUM_CHOSEN)
    x = Sum(residual, branch, ALPHA, 1.0)
    units = 2 + (NUM_CHOSEN if has_picks else 1)
    ms = cold_ms(lambda: rms_norm(x, weight, EPS))
    return row_of(ms=ms, num_bytes=units * residual.numel() * 2)


def _swiglu() -> Row:
    h, weight = normal(NUM_PICKS, 2 * INNER), torch.rand(NUM_PICKS, 1, device="cuda")
    return row_of(ms=cold_ms(lambda: swiglu_weighted(h, weight)), num_bytes=3 * h.numel())


def _route() -> Row:
    """Each token is read once; the products are next to nothing."""
    x, gate = normal(TOKENS, HIDDEN), torch.randn(NUM_EXPERTS, HIDDEN, device="cuda")
    return row_of(ms=cold_ms(lambda: route(x, gate, NUM_CHOSEN)), num_bytes=x.numel() * 2)


def _gather() -> Row:
    """Each token is read once and written once a pick."""
    x, token_M = normal(TOKENS, HIDDEN), _places() // NUM_CHOSEN
    ms = cold_ms(lambda: x.index_select(0, token_M))
    return row_of(ms=ms, num_bytes=(1 + NUM_CHOSEN) * x.numel() * 2)


@torch.no_grad()
def _silu() -> Row:
    qkv = normal(TOKENS, 3 * NUM_HEADS * HEAD_DIM)
    return row_of(ms=cold_ms(lambda: F.silu(qkv, inplace=True)), num_bytes=2 * qkv.numel() * 2)


def _places() -> Tensor:
    return torch.randperm(NUM_PICKS, device="cuda")
