"""Log-probabilities of given tokens from hidden states; a [T, V] tensor never exists.

The vocabulary is walked in chunks: a chunk's logits are multiplied out, folded into running sums
of each token and overwritten by the next chunk's; backward multiplies them out once more.
Shapes: T tokens, E hidden, V vocabulary, C columns of one chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from m1serve.kernels.checks import check_devices, check_index_tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

WORKSPACE_BYTES = 640 << 20
"""Of logits, and of their gradients in backward, that exist at one time."""
MIN_CHUNK = 4096
"""Below this, reading and writing the sum of hidden's gradient costs more than the chunk saves."""
LOWEST = -1e38
"""The running maximum before the first logit. Finite, so that a gap times a zero sum is zero."""


class LinearLogprobs(NamedTuple):
    logprob_T: Tensor
    entropy_T: Tensor


class Elementwise(Protocol):
    """What is done to a chunk's logits between two matrix products."""

    def fold_chunk(
        self, logits_TC: Tensor, running_4T: Tensor, target_T: Tensor, start: int
    ) -> None:
        """Adds columns `start` + [0, C) to `running_4T`; may overwrite the logits.

        Rows: maximum, Σ e^gap, Σ gap · e^gap, the target's logit; a gap is logit - maximum.
        """

    def differentiate_chunk(
        self, logits_TC: Tensor, rows_5T: Tensor, target_T: Tensor, start: int, out_TC: Tensor
    ) -> None:
        """The logits' gradient, into `out_TC`, which may be the logits themselves.

        Rows: maximum, log Σ e^gap, entropy, gradients of the logprob and of the entropy.
        """


def linear_logprobs(
    hidden_TE: Tensor, weight_VE: Tensor, target_T: Tensor, *, chunk: int | None = None
) -> LinearLogprobs:
    """log softmax(hidden @ weight.T)[target] and the whole distribution's entropy, both [T].

    hidden and weight have one dtype; products, sums and results are fp32 (float64 of float64).
    bf16 is multiplied as stored on CUDA, where the logits' gradient is rounded to bf16 before the
    two products that use it; all else is raised to fp32 first. Differentiable for hidden and
    weight through both results, once. `chunk` columns are computed at a time, by default what
    WORKSPACE_BYTES holds, but at least MIN_CHUNK; backward also keeps an fp32 [T, E].

    target is int32 or int64. One outside [0, V) raises ValueError on the CPU; on CUDA, where
    nothing is read back, its logprob is NaN.
    """
    _check(hidden_TE, weight_VE, target_T, chunk)
    target_T = target_T.contiguous()
    logprob_T, entropy_T = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_TE, weight_VE, target_T, chunk
    )
    return LinearLogprobs(logprob_T, entropy_T)


def chunk_width(num_tokens: int, vocab_size: int, logit_bytes: int) -> int:
    """Columns of a chunk: chunks of near-equal width, a multiple of 128, within the workspace."""
    fit = max(WORKSPACE_BYTES // (logit_bytes * max(num_tokens, 1)), MIN_CHUNK)
    num_chunks = -(-vocab_size // fit)
    return -(-vocab_size // (num_chunks * 128)) * 128


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden_TE: Tensor,
        weight_VE: Tensor,
        target_T: Tensor,
        chunk: int | None,
    ) -> tuple[Tensor, Tensor]:
        T, V = len(hidden_TE), len(weight_VE)
        exact, operand = _dtypes(hidden_TE)
        elementwise = _elementwise(hidden_TE)
        width = chunk or chunk_width(T, V, exact.itemsize)
        h_TE = hidden_TE.to(operand)
        logits_TC = h_TE.new_empty(T, width, dtype=exact)
        start_4 = logits_TC.new_tensor([LOWEST, 0.0, 0.0, torch.nan])
        running_4T = start_4[:, None].repeat(1, T)
        for start in range(0, V, width):
            w_CE = weight_VE[start : start + width].to(operand)
            part_TC = logits_TC[:, : len(w_CE)]
            _multiply(h_TE, w_CE.t(), part_TC)
            elementwise.fold_chunk(part_TC, running_4T, target_T, start)
        max_T, sum_T, weighted_T, picked_T = running_4T
        log_sum_T = sum_T.log()
        entropy_T = log_sum_T - weighted_T / sum_T
        ctx.save_for_backward(hidden_TE, weight_VE, target_T, max_T, log_sum_T, entropy_T)
        ctx.chunk = chunk
        return picked_T - max_T - log_sum_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_logprob_T: Tensor,
        grad_entropy_T: Tensor,
    ) -> tuple[Tensor | None, ...]:
        hidden_TE, weight_VE, target_T, *of_row = ctx.saved_tensors
        T, V = len(hidden_TE), len(weight_VE)
        exact, operand = _dtypes(hidden_TE)
        elementwise = _elementwise(hidden_TE)
        rows_5T = torch.stack([*of_row, grad_logprob_T, grad_entropy_T])
        is_rounded = operand != exact
        held_bytes = exact.itemsize + (operand.itemsize if is_rounded else 0)
        width = ctx.chunk or chunk_width(T, V, held_bytes)
        h_TE = hidden_TE.to(operand)
        logits_TC = h_TE.new_empty(T, width, dtype=exact)
        grads_TC = torch.empty_like(logits_TC, dtype=operand) if is_rounded else logits_TC
        d_hidden_TE = d_weight_VE = None
        if ctx.needs_input_grad[0]:
            d_hidden_TE = torch.zeros_like(h_TE, dtype=exact)
        if ctx.needs_input_grad[1]:
            d_weight_VE = torch.empty_like(weight_VE)
        for start in range(0, V, width):
            w_CE = weight_VE[start : start + width].to(operand)
            part_TC, grad_TC = logits_TC[:, : len(w_CE)], grads_TC[:, : len(w_CE)]
            _multiply(h_TE, w_CE.t(), part_TC)
            elementwise.differentiate_chunk(part_TC, rows_5T, target_T, start, grad_TC)
            if d_hidden_TE is not None:
                _multiply_add(grad_TC, w_CE, d_hidden_TE)
            if d_weight_VE is not None:
                _multiply(grad_TC.t(), h_TE, d_weight_VE[start : start + width])
        if d_hidden_TE is not None:
            d_hidden_TE = d_hidden_TE.to(hidden_TE.dtype)
        return d_hidden_TE, d_weight_VE, None, None


class _TorchElementwise:
    """`Elementwise` in plain torch, on any device."""

    def fold_chunk(
        self, logits_TC: Tensor, running_4T: Tensor, target_T: Tensor, start: int
    ) -> None:
        max_T, sum_T, weighted_T, picked_T = running_4T
        place_T1, is_here_T = _place(target_T, start, logits_TC)
        at_T = logits_TC.gather(1, place_T1).squeeze(1)
        picked_T.copy_(torch.where(is_here_T, at_T, picked_T))
        higher_T = torch.maximum(max_T, logits_TC.amax(1))
        gap_TC = logits_TC.sub_(higher_T[:, None])
        e_TC = gap_TC.exp()
        gap_T = max_T - higher_T
        shrink_T = gap_T.exp()
        weighted_T.addcmul_(gap_T, sum_T).mul_(shrink_T)
        sum_T.mul_(shrink_T).add_(e_TC.sum(1))
        weighted_T.add_(e_TC.mul_(gap_TC).sum(1))
        max_T.copy_(higher_T)

    def differentiate_chunk(
        self, logits_TC: Tensor, rows_5T: Tensor, target_T: Tensor, start: int, out_TC: Tensor
    ) -> None:
        max_T1, log_sum_T1, entropy_T1, by_logprob_T1, by_entropy_T1 = rows_5T[..., None]
        place_T1, is_here_T = _place(target_T, start, logits_TC)
        logp_TC = logits_TC.sub_(max_T1).sub_(log_sum_T1)
        p_TC = logp_TC.exp()
        constant_T1 = by_logprob_T1 + by_entropy_T1 * entropy_T1
        logp_TC.mul_(-by_entropy_T1).sub_(constant_T1).mul_(p_TC)
        here_T1 = torch.where(is_here_T[:, None], by_logprob_T1, 0.0)
        out_TC.copy_(logp_TC.scatter_add_(1, place_T1, here_T1))


def _place(target_T: Tensor, start: int, logits_TC: Tensor) -> tuple[Tensor, Tensor]:
    """Each target's column in the chunk, [T, 1], and whether it has one."""
    local_T = target_T.long() - start
    C = logits_TC.shape[1]
    return local_T.clamp(0, C - 1)[:, None], (local_T >= 0) & (local_T < C)


def _elementwise(hidden_TE: Tensor) -> Elementwise:
    if hidden_TE.is_cuda and hidden_TE.dtype != torch.float64:
        from m1serve.kernels import logprobs_triton

        return logprobs_triton
    return _TorchElementwise()


def _dtypes(hidden_TE: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Of sums, and of what is multiplied. fp16 is raised: its logits' gradient underflows."""
    exact = torch.float64 if hidden_TE.dtype == torch.float64 else torch.float32
    is_kept = hidden_TE.is_cuda and hidden_TE.dtype == torch.bfloat16
    return exact, torch.bfloat16 if is_kept else exact


def _multiply(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    if a_MK.dtype == out_MN.dtype:
        torch.mm(a_MK, b_KN, out=out_MN)
    elif out_MN.dtype == torch.float32:
        torch.mm(a_MK, b_KN, out_dtype=torch.float32, out=out_MN)
    else:
        out_MN.copy_(a_MK @ b_KN)


def _multiply_add(a_MK: Tensor, b_KN: Tensor, sum_MN: Tensor) -> None:
    if a_MK.dtype == sum_MN.dtype:
        sum_MN.addmm_(a_MK, b_KN)
    else:
        torch.addmm(sum_MN, a_MK, b_KN, out_dtype=torch.float32, out=sum_MN)


def _check(hidden_TE: Tensor, weight_VE: Tensor, target_T: Tensor, chunk: int | None) -> None:
    for name, tensor, wanted in (
        ("hidden", hidden_TE, "[tokens, hidden]"),
        ("weight", weight_VE, "[vocabulary, hidden]"),
    ):
        if tensor.dim() != 2:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, wanted {wanted}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}, wanted one of {DTYPES}")
    if weight_VE.dtype != hidden_TE.dtype:
        raise ValueError(f"weight is {weight_VE.dtype}, wanted {hidden_TE.dtype} as hidden")
    (T, E), V = hidden_TE.shape, len(weight_VE)
    if V == 0 or weight_VE.shape[1] != E:
        raise ValueError(
            f"weight has shape {list(weight_VE.shape)}, wanted [vocabulary, {E}] for hidden "
            f"{[T, E]}, and a vocabulary that is not empty"
        )
    check_index_tensor(target_T, "target")
    if len(target_T) != T:
        raise ValueError(f"target has {len(target_T)} tokens, wanted {T} as hidden")
    check_devices(hidden_TE.device, weight=weight_VE, target=target_T)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}, wanted at least 1 column")
    if (
        target_T.device.type == "cpu"
        and T
        and not 0 <= int(target_T.min()) <= int(target_T.max()) < V
    ):
        raise ValueError(
            f"target has ids from {int(target_T.min())} to {int(target_T.max())}, "
            f"wanted all in [0, {V}): the weight's rows"
        )
