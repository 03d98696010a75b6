"""What the benchmark and its checks feed the kernels, and how they judge an answer.

Shapes: T tokens of all sequences, N sequences, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from m1serve.kernels.decay import slopes
from m1serve.kernels.reference import lightning_chunked

# MiniMax-M1's
NUM_HEADS, NUM_LAYERS, HEAD_DIM = 64, 80, 128

# tokens: fewer are judged together with the other short sequences of a call
SHORT = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Sequences packed one after another, as the model passes them."""

    q_THD: Tensor
    k_THD: Tensor
    v_THD: Tensor
    slope_H: Tensor
    cu_seqlens: list[int]
    state_NHDD: Tensor | None = None
    "what each sequence starts from, fp32; none is zeros"

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def spans(self) -> list[slice]:
        return [slice(a, b) for a, b in pairwise(self.cu_seqlens)]

    def only(self, index: int) -> Sequences:
        """One sequence of these, as views."""
        span = self.spans[index]
        return Sequences(
            q_THD=self.q_THD[span],
            k_THD=self.k_THD[span],
            v_THD=self.v_THD[span],
            slope_H=self.slope_H,
            cu_seqlens=[0, span.stop - span.start],
            state_NHDD=None if self.state_NHDD is None else self.state_NHDD[index : index + 1],
        )


def random_sequences(
    lengths: Sequence[int],
    slope_H: Tensor,
    *,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype = torch.bfloat16,
    is_continued: bool = False,
    seed: int = 0,
) -> Sequences:
    """Views of one packed qkv [T, H, 3 D] on the slopes' device, standard normal."""
    device, num_heads = slope_H.device, slope_H.numel()
    generator = torch.Generator(device).manual_seed(seed)
    cu_seqlens = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    shape = (cu_seqlens[-1], num_heads, 3 * head_dim)
    qkv = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    state = None
    if is_continued:
        shape_NHDD = (len(lengths), num_heads, head_dim, head_dim)
        state = 4 * torch.randn(shape_NHDD, generator=generator, device=device)
    q, k, v = qkv.chunk(3, dim=-1)
    return Sequences(
        q_THD=q, k_THD=k, v_THD=v, slope_H=slope_H, cu_seqlens=cu_seqlens, state_NHDD=state
    )


def layer_slopes(layer: int, device: str, heads: slice = slice(None)) -> Tensor:
    """One layer's slopes of M1, or those of some of its heads."""
    return slopes(NUM_HEADS, NUM_LAYERS, layer)[heads].contiguous().to(device)


@dataclass(frozen=True, slots=True)
class Answer:
    """What lightning attention of packed sequences comes to."""

    o_THD: Tensor
    state_NHDD: Tensor


def exact_answer(sequences: Sequences) -> Answer:
    """In float64, differentiable towards q, k, v and the initial state."""
    outputs, states = [], []
    for n, span in enumerate(sequences.spans):
        q, k, v = (
            t[span].double()[None] for t in (sequences.q_THD, sequences.k_THD, sequences.v_THD)
        )
        state = None if sequences.state_NHDD is None else sequences.state_NHDD[n][None].double()
        o, state = lightning_chunked(q, k, v, sequences.slope_H.double(), state)
        outputs.append(o[0])
        states.append(state)
    return Answer(torch.cat(outputs), torch.cat(states))


def worst_error(got: Tensor, wanted: Tensor, *, head_dim: int) -> float:
    """The largest relative error |got - wanted| / |wanted| of any head; NaN wherever NaN was got.

    `head_dim` is the position of the head axis. A total norm would hide a head that is wrong.
    """
    got_HX = got.double().movedim(head_dim, 0).flatten(1)
    wanted_HX = wanted.double().movedim(head_dim, 0).flatten(1)
    error_H = (got_HX - wanted_HX).norm(dim=1) / wanted_HX.norm(dim=1).clamp(min=1e-30)
    return float(error_H.max()) if bool(error_H.isfinite().all()) else float("nan")


def answer_error(got: Answer, wanted: Answer, cu_seqlens: Sequence[int]) -> float:
    """The worst head of any sequence, in the outputs or in the final state."""
    errors = [
        worst_error(got.state_NHDD[n], wanted.state_NHDD[n], head_dim=0)
        for n in range(len(cu_seqlens) - 1)
    ]
    return worst([*errors, *span_errors(got.o_THD, wanted.o_THD, cu_seqlens)])


def span_errors(got_THD: Tensor, wanted_THD: Tensor, cu_seqlens: Sequence[int]) -> list[float]:
    """Of each sequence its worst head; those shorter than SHORT count as one.

    A single token's score can cancel to nearly nothing, and the error relative to that would say
    how near, not how exact a kernel is.
    """
    spans = [slice(a, b) for a, b in pairwise(cu_seqlens)]
    long = [span for span in spans if span.stop - span.start >= SHORT]
    errors = [worst_error(got_THD[span], wanted_THD[span], head_dim=1) for span in long]
    short = [t for span in spans if span not in long for t in range(span.start, span.stop)]
    if short:
        errors.append(worst_error(got_THD[short], wanted_THD[short], head_dim=1))
    return errors


def worst(errors: Sequence[float]) -> float:
    """The largest, where NaN is larger than anything."""
    return float(torch.tensor(list(errors), dtype=torch.float64).max())


def largest_difference(got: Tensor, wanted: Tensor) -> float:
    """0 for the same bits (NaN of the same bits too), else the largest |difference| or infinity."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    if torch.equal(got.contiguous().view(integers), wanted.contiguous().view(integers)):
        return 0.0
    difference = float((got.double() - wanted.double()).abs().max())
    # -0.0 and 0.0 differ in bits alone
    return max(difference, 5e-324) if difference == difference else float("inf")
