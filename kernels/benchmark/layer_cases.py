"""The timed cases of what stands beside attention: gated norm, experts, log-probabilities.

Shapes: T tokens, I = H x D channels, E hidden, F inner, X experts, P chosen experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from m1serve.kernels.benchmark.cases import Case
from m1serve.kernels.benchmark.inputs import HEAD_DIM, NUM_HEADS
from m1serve.kernels.benchmark.report import OURS, Row
from m1serve.kernels.benchmark.timing import cold_ms
from m1serve.kernels.logprobs import linear_logprobs
from m1serve.kernels.moe import grouped_experts, looped
from m1serve.kernels.norm import gated_rms_norm

NORM_TOKENS, CHANNELS = 65536, NUM_HEADS * HEAD_DIM
HIDDEN, INNER, NUM_EXPERTS, NUM_CHOSEN = 6144, 9216, 32, 2
VOCAB, LOGPROB_TOKENS, EXPERT_TOKENS = 200064, 8192, 8192
FOUR_GEMMS = "four GEMMs"
UNFUSED, LOOP = "torch, unfused", "torch, a loop"
NORM_NAME = f"T={NORM_TOKENS} I={CHANNELS}"
EXPERTS_NAME = f"T={EXPERT_TOKENS} E={HIDDEN} F={INNER} X={NUM_EXPERTS} top {NUM_CHOSEN}"
LOGPROBS_NAME = f"T={LOGPROB_TOKENS} E={HIDDEN} V={VOCAB}"

Norm = Callable[[Tensor, Tensor, Tensor], Tensor]
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def unfused_norm(x_TI: Tensor, gate_TI: Tensor, weight_I: Tensor) -> Tensor:
    wide_TI = x_TI.float()
    scale_T1 = torch.rsqrt(wide_TI.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide_TI * scale_T1 * weight_I * torch.sigmoid(gate_TI.float())).to(x_TI.dtype)


def norm_cases() -> Iterator[Case]:
    """Forward reads x and gate and writes y; backward reads x, gate, dy and writes dx, dgate."""
    for name, norm in ((OURS, gated_rms_norm), (UNFUSED, unfused_norm)):
        yield case_of("gated_rms_norm", NORM_NAME, name, partial(_norm, norm, backward=False))
        yield case_of(
            "gated_rms_norm", f"{NORM_NAME} + backward", name, partial(_norm, norm, backward=True)
        )


def _norm(norm: Norm, *, backward: bool) -> Row:
    x, gate, dy = normal(3, NORM_TOKENS, CHANNELS)
    weight = torch.rand(CHANNELS, device="cuda", dtype=torch.bfloat16) + 0.5
    leaves = [t.detach().requires_grad_(backward) for t in (x, gate, weight)]

    def call() -> object:
        y = norm(*leaves)
        return torch.autograd.grad(y, leaves, dy) if backward else y

    units = 8 if backward else 3
    return row_of(ms=cold_ms(call), num_bytes=units * x.numel() * 2)


def expert_cases() -> Iterator[Case]:
    for name, experts in ((OURS, grouped_experts), (LOOP, looped)):
        yield case_of("moe", EXPERTS_NAME, name, partial(_experts, experts, backward=False))
        yield case_of(
            "moe", f"{EXPERTS_NAME} + backward", name, partial(_experts, experts, backward=True)
        )


def _experts(experts: Experts, *, backward: bool) -> Row:
    """Three products forwards, twice as many operations backwards; each weight is read once."""
    x = normal(EXPERT_TOKENS, HIDDEN)
    w13 = normal(NUM_EXPERTS, 2 * INNER, HIDDEN).mul_(HIDDEN**-0.5)
    w2 = normal(NUM_EXPERTS, HIDDEN, INNER).mul_(INNER**-0.5)
    chosen = torch.rand(EXPERT_TOKENS, NUM_EXPERTS, device="cuda").topk(NUM_CHOSEN).indices
    weight = torch.rand(EXPERT_TOKENS, NUM_CHOSEN, device="cuda")
    leaves = [t.requires_grad_(backward) for t in (x, w13, w2, weight)]
    dy = torch.randn(x.shape, device=x.device, dtype=x.dtype)

    def call() -> object:
        y = experts(x, w13, w2, weight, chosen)
        return torch.autograd.grad(y, leaves, dy) if backward else y

    passes = 3 if backward else 1
    num_flops = passes * 6 * EXPERT_TOKENS * NUM_CHOSEN * HIDDEN * INNER
    num_bytes = passes * 2 * (w13.numel() + w2.numel())
    ms = cold_ms(call)
    return row_of(ms=ms, num_bytes=num_bytes, num_flops=num_flops)


def logprob_cases() -> Iterator[Case]:
    """Forward and backward, and the four products that no implementation can do without."""
    yield case_of("linear_logprobs", LOGPROBS_NAME, FOUR_GEMMS, _four_gemms)
    yield case_of("linear_logprobs", LOGPROBS_NAME, OURS, _logprobs)


def _logprob_inputs() -> tuple[Tensor, Tensor]:
    hidden = normal(LOGPROB_TOKENS, HIDDEN)
    weight = normal(VOCAB, HIDDEN).mul_(HIDDEN**-0.5)
    return hidden, weight


def _logprob_flops() -> float:
    return 4 * 2.0 * LOGPROB_TOKENS * HIDDEN * VOCAB


def _logprobs() -> Row:
    hidden, weight = (t.requires_grad_() for t in _logprob_inputs())
    target = torch.randint(VOCAB, (LOGPROB_TOKENS,), device="cuda")
    grad = torch.randn(LOGPROB_TOKENS, device="cuda")

    def call() -> tuple[Tensor, ...]:
        found = linear_logprobs(hidden, weight, target)
        gradients = torch.autograd.grad(found.logprob_T, (hidden, weight), grad)
        return (*gradients, *found)

    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    kept = sum(t.numel() * t.element_size() for t in results)
    beyond = torch.cuda.max_memory_allocated() - before - kept
    del results
    return row_of(
        ms=cold_ms(call, spend_ms=600),
        num_flops=_logprob_flops(),
        extra={"peak_gib_beyond": beyond / 2**30},
    )


def _four_gemms() -> Row:
    hidden, weight = _logprob_inputs()
    logits = normal(LOGPROB_TOKENS, VOCAB)
    out = torch.empty_like(logits)
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def call() -> None:
        torch.mm(hidden, weight.T, out=out)
        torch.mm(hidden, weight.T, out=out)
        torch.mm(logits, weight, out=d_hidden)
        torch.mm(logits.T, hidden, out=d_weight)

    ms = cold_ms(call, spend_ms=600)
    return row_of(ms=ms, num_flops=_logprob_flops())


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def row_of(
    *,
    ms: float,
    num_bytes: float = 0.0,
    num_flops: float = 0.0,
    extra: dict[str, float] | None = None,
) -> Row:
    """A measurement; its case adds the names."""
    return Row(
        op="", case="", impl="", ms=ms, num_bytes=num_bytes, num_flops=num_flops, extra=extra or {}
    )


def case_of(op: str, case: str, impl: str, run: Callable[[], Row]) -> Case:
    def named() -> Row:
        return replace(run(), op=op, case=case, impl=impl)

    return Case(op=op, case=case, impl=impl, run=named)
