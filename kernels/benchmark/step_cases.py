"""The timed cases of a decode step beside attention: experts, router, projections, logits.

All in CUDA graphs on weights that L2 does not hold; a floor is the bytes of the weights that a step
must read. Shapes: N tokens, E hidden, F inner, X experts, P chosen experts, O out, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from m1serve.kernels.benchmark.cases import ROTATION_BYTES, Case
from m1serve.kernels.benchmark.layer_cases import (
    HIDDEN,
    INNER,
    NUM_CHOSEN,
    NUM_EXPERTS,
    case_of,
    normal,
    row_of,
)
from m1serve.kernels.benchmark.report import OURS, Row
from m1serve.kernels.benchmark.timing import graph_ms
from m1serve.kernels.linear import fp32_logits, linear
from m1serve.kernels.moe import experts, route, routed_experts
from m1serve.kernels.moe_sorted import grouped_picks
from m1serve.kernels.residual import Picks

BATCHES = (1, 8, 32, 128)
PROJECTIONS = {"qkv": (24576, 6144), "gate": (8192, 6144), "out": (6144, 8192), "k": (1024, 6144)}
VOCABS = (32768, 200064)
GROUPED, TORCH = "torch, grouped", "torch"
TWO_CALLS = "route, then experts"
NUM_DRAWS = 8
"""Choices of experts, or of tokens, that one graph runs through."""
EXPERT_BYTES = 3 * HIDDEN * INNER * 2

Product = Callable[[Tensor, Tensor], object]
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], object]
Routed = Callable[[Tensor, Tensor, Tensor, Tensor, int], object]


def step_cases() -> Iterator[Case]:
    yield from _expert_cases()
    projections: dict[str, Product] = {OURS: linear, TORCH: F.linear}
    heads: dict[str, Product] = {OURS: fp32_logits, TORCH: _logits_of_torch}
    for num_tokens in (1, 32):
        for name, shape in PROJECTIONS.items():
            for impl, product in projections.items():
                run = partial(product_row, product, num_tokens, shape)
                yield case_of("linear", f"{name} N={num_tokens}", impl, run)
        for vocab in VOCABS:
            for impl, product in heads.items():
                run = partial(product_row, product, num_tokens, (vocab, HIDDEN))
                yield case_of("fp32_logits", head_name(num_tokens, vocab), impl, run)
        for impl, is_fused in ((OURS, True), (TORCH, False)):
            timed = partial(_router, num_tokens, is_fused=is_fused)
            yield case_of("route", f"N={num_tokens} X={NUM_EXPERTS}", impl, timed)


def experts_name(num_tokens: int) -> str:
    return f"N={num_tokens} of {NUM_EXPERTS} experts top {NUM_CHOSEN}"


def head_name(num_tokens: int, vocab: int) -> str:
    return f"N={num_tokens} V={vocab}"


def _expert_cases() -> Iterator[Case]:
    for num_tokens in BATCHES:
        for impl, run in ((OURS, experts), (GROUPED, _grouped)):
            yield case_of(
                "moe_decode", experts_name(num_tokens), impl, partial(experts_row, run, num_tokens)
            )

    for impl, routed in ((OURS, routed_experts), (TWO_CALLS, _route_then_experts)):
        run_routed = partial(_routed_row, routed)
        yield case_of(
            "moe_routed", f"N=1 of {NUM_EXPERTS} experts top {NUM_CHOSEN}", impl, run_routed
        )


def _route_then_experts(
    x_NE: Tensor, gate_XE: Tensor, w13_X2FE: Tensor, w2_XEF: Tensor, num_chosen: int
) -> Tensor | Picks:
    weight_NP, chosen_NP, _ = route(x_NE, gate_XE, num_chosen)
    return experts(x_NE, w13_X2FE, w2_XEF, weight_NP, chosen_NP)


@torch.no_grad()
def _routed_row(run: Routed) -> Row:
    """One token through the router and its experts."""
    w13 = normal(NUM_EXPERTS, 2 * INNER, HIDDEN).mul_(HIDDEN**-0.5)
    w2 = normal(NUM_EXPERTS, HIDDEN, INNER).mul_(INNER**-0.5)
    gates = [torch.randn(NUM_EXPERTS, HIDDEN, device="cuda") for _ in range(NUM_DRAWS)]
    calls = [partial(run, normal(1, HIDDEN), gate, w13, w2, NUM_CHOSEN) for gate in gates]
    num_bytes = NUM_CHOSEN * EXPERT_BYTES + gates[0].numel() * 4
    return row_of(ms=graph_ms(calls), num_bytes=num_bytes)


def _grouped(
    x_NE: Tensor, w13_X2FE: Tensor, w2_XEF: Tensor, weight_NP: Tensor, chosen_NP: Tensor
) -> Picks:
    y_ME, place_M, *_ = grouped_picks(x_NE, w13_X2FE, w2_XEF, weight_NP, chosen_NP)
    return Picks(y_ME, place_M, chosen_NP.shape[1])


@torch.no_grad()
def experts_row(run: Experts, num_tokens: int) -> Row:
    """Each draw has tokens and choices of its own; the floor is the experts that it touches."""
    w13 = normal(NUM_EXPERTS, 2 * INNER, HIDDEN).mul_(HIDDEN**-0.5)
    w2 = normal(NUM_EXPERTS, HIDDEN, INNER).mul_(INNER**-0.5)
    calls, num_touched = [], 0
    for _ in range(NUM_DRAWS):
        chosen = torch.rand(num_tokens, NUM_EXPERTS, device="cuda").topk(NUM_CHOSEN).indices
        weight = torch.rand(num_tokens, NUM_CHOSEN, device="cuda")
        num_touched += int(chosen.flatten().bincount(minlength=NUM_EXPERTS).count_nonzero())
        calls.append(partial(run, normal(num_tokens, HIDDEN), w13, w2, weight, chosen))
    touched = num_touched / NUM_DRAWS
    return row_of(
        ms=graph_ms(calls), num_bytes=touched * EXPERT_BYTES, extra={"experts_touched": touched}
    )


@torch.no_grad()
def product_row(product: Product, num_tokens: int, shape: tuple[int, int]) -> Row:
    num_bytes = shape[0] * shape[1] * 2
    num_sets = max(2, -(-ROTATION_BYTES // num_bytes))
    calls = []
    for _ in range(num_sets):
        weight = normal(*shape).mul_(shape[1] ** -0.5)
        calls.append(partial(product, normal(num_tokens, shape[1]), weight))
    return row_of(ms=graph_ms(calls), num_bytes=num_bytes)


def _logits_of_torch(hidden_NE: Tensor, weight_VE: Tensor) -> Tensor:
    return torch.mm(hidden_NE, weight_VE.t(), out_dtype=torch.float32)


def _router(num_tokens: int, *, is_fused: bool) -> Row:
    """Gradients wanted: torch's operations; not wanted: the kernels. Both without a backward."""
    shape = (NUM_EXPERTS, HIDDEN)
    num_bytes = shape[0] * shape[1] * 4
    calls = []
    for _ in range(-(-ROTATION_BYTES // num_bytes)):
        gate = torch.randn(shape, device="cuda")
        calls.append(partial(route, normal(num_tokens, HIDDEN), gate, NUM_CHOSEN))
    with torch.set_grad_enabled(not is_fused):
        return row_of(ms=graph_ms(calls), num_bytes=num_bytes)
