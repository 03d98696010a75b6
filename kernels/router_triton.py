"""The router in Triton: softmax, choice and weights in one launch, logits of few tokens in another.

Products and sums are fp32 multiply-adds, never TF32. Inputs are taken as checked (`moe.route`).
Shapes: N tokens, E hidden, X experts, P chosen experts; R tokens of a program, K of E.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201  (a jit kernel's annotations are constexpr only)
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from m1serve.kernels.after_triton import bring_to_l2, pdl, release, wait

MAX_DEPTH = 8192
WARPS = 16


class Chosen(NamedTuple):
    weight_NP: Tensor
    chosen_NP: Tensor
    p_NX: Tensor


def few_logits(x_NE: Tensor, gate_XE: Tensor) -> Tensor:
    """x gateᵀ, fp32 [N, X]; each token stands alone."""
    x_NE, gate_XE = x_NE.contiguous(), gate_XE.contiguous()
    (N, E), X = x_NE.shape, gate_XE.shape[0]
    logits_NX = torch.empty(N, X, dtype=torch.float32, device=x_NE.device)
    R = tokens_a_program(N)
    if N:
        with torch.cuda.device_of(x_NE):
            logits_kernel[(X, triton.cdiv(N, R))](
                *(x_NE, gate_XE, logits_NX, N, E),
                R=R,
                DEPTH=min(triton.next_power_of_2(E), MAX_DEPTH),
                num_warps=WARPS,
                # said, because triton 3.9 warns where its default is taken
                enable_fp_fusion=True,
                **pdl(x_NE),
            )
    return logits_NX


def choose(logits_NX: Tensor, num_chosen: int) -> Chosen:
    """Of fp32 logits; of equally probable experts the lower comes first.

    A token whose logits are not all numbers gets NaN weights and P different experts.
    """
    logits_NX = logits_NX.contiguous()
    N, X = logits_NX.shape
    p_NX = torch.empty_like(logits_NX)
    weight_NP = logits_NX.new_empty(N, num_chosen)
    chosen_NP = torch.empty(N, num_chosen, dtype=torch.int64, device=logits_NX.device)
    if N:
        with torch.cuda.device_of(logits_NX):
            choice_kernel[(N,)](
                *(logits_NX, weight_NP, chosen_NP, p_NX, X),
                P=num_chosen,
                BLOCK_P=triton.next_power_of_2(num_chosen),
                BLOCK_X=triton.next_power_of_2(X),
                num_warps=1,
                enable_fp_fusion=True,
                **pdl(logits_NX),
            )
    return Chosen(weight_NP, chosen_NP, p_NX)


def tokens_a_program(num_tokens: int) -> int:
    """One while that fills the GPU; more read an expert's row once for all of them."""
    return 1 if num_tokens <= 8 else 2


@triton.jit
def logits_kernel(
    x_NE,
    gate_XE,
    logits_NX,
    num_tokens,
    num_hidden,
    R: tl.constexpr,
    DEPTH: tl.constexpr,
    WAIT: tl.constexpr,
):
    """One expert and R tokens: a lane adds products of its own K, then lanes are added."""
    release(WAIT)
    x = tl.program_id(0)
    if WAIT and DEPTH >= 32:
        # fp32: 32 in a line of L2
        line_L = tl.minimum(tl.arange(0, DEPTH // 32) * 32, num_hidden - 1)
        bring_to_l2(gate_XE + x * num_hidden + line_L)
    wait(WAIT)
    i_R = tl.program_id(1) * R + tl.arange(0, R)
    i_K = tl.arange(0, DEPTH)
    real_R = i_R < num_tokens
    sum_RK = tl.zeros([R, DEPTH], dtype=tl.float32)
    for start in range(0, num_hidden, DEPTH):
        k_K = start + i_K
        real_K = k_K < num_hidden
        gate_K = tl.load(gate_XE + x * num_hidden + k_K, mask=real_K, other=0.0).to(tl.float32)
        x_ptr_RK = x_NE + i_R[:, None] * num_hidden + k_K[None, :]
        x_RK = tl.load(x_ptr_RK, mask=real_R[:, None] & real_K[None, :], other=0.0)
        sum_RK += x_RK.to(tl.float32) * gate_K[None, :]
    out_ptr_R = logits_NX + i_R * tl.num_programs(0) + x
    tl.store(out_ptr_R, tl.sum(sum_RK, 1), mask=real_R)


@triton.jit
def choice_kernel(
    logits_NX,
    weight_NP,
    chosen_NP,
    p_NX,
    num_experts,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_X: tl.constexpr,
    WAIT: tl.constexpr,
):
    release(WAIT)
    wait(WAIT)
    n = tl.program_id(0).to(tl.int64)
    i_X = tl.arange(0, BLOCK_X)
    i_P = tl.arange(0, BLOCK_P)
    real_X = i_X < num_experts
    logit_X = tl.load(logits_NX + n * num_experts + i_X, mask=real_X, other=float("-inf"))
    weight_P, chosen_P, p_X = chosen_of(logit_X, i_X, real_X, i_P, P, BLOCK_X)
    tl.store(p_NX + n * num_experts + i_X, p_X, mask=real_X)
    tl.store(weight_NP + n * P + i_P, weight_P, mask=i_P < P)
    tl.store(chosen_NP + n * P + i_P, chosen_P.to(tl.int64), mask=i_P < P)


@triton.jit
def chosen_of(logit_X, i_X, real_X, i_P, P: tl.constexpr, BLOCK_X: tl.constexpr):
    """Weights, experts and all probabilities of one token, as `choose` says."""
    number_X = tl.where(logit_X == logit_X, logit_X, float("-inf"))
    e_X = tl.exp(logit_X - tl.maximum(tl.max(number_X, 0), -1e38))
    p_X = e_X / tl.sum(e_X, 0)
    # NaN is below every probability, so that a token of NaN takes the first experts
    left_X = tl.where(real_X & (p_X == p_X), p_X, -1.0)
    is_left_X = real_X
    weight_P = i_P.to(tl.float32) * 0.0
    chosen_P = i_P * 0
    for pick in tl.static_range(P):
        is_best_X = is_left_X & (left_X == tl.max(tl.where(is_left_X, left_X, -1.0), 0))
        at = tl.min(tl.where(is_best_X, i_X, BLOCK_X), 0)
        weight = tl.sum(tl.where(i_X == at, p_X, 0.0), 0)
        weight_P = tl.where(i_P == pick, weight, weight_P)
        chosen_P = tl.where(i_P == pick, at, chosen_P)
        is_left_X = is_left_X & (i_X != at)
    return weight_P / tl.sum(weight_P, 0), chosen_P, p_X
