"""How exact the gated norm, the experts and the log-probabilities are, against float64.

Shapes: T tokens, I channels, E hidden, F inner, X experts, P chosen experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from m1serve.kernels.benchmark.checks import BARS, CheckCase, Setting
from m1serve.kernels.benchmark.inputs import worst, worst_error
from m1serve.kernels.logprobs import linear_logprobs
from m1serve.kernels.moe import grouped_experts
from m1serve.kernels.norm import gated_rms_norm

# bf16 inner activations and their gradients are rounded several times on the way
EXPERTS_BAR = 1e-2
LOGPROB_BAR = 1e-4
Tensors = Sequence[Tensor]


def layer_checks(setting: Setting) -> Iterator[CheckCase]:
    for dtype, bar in BARS.items():
        for num_tokens in (1, 300):
            yield CheckCase(
                op="gated_rms_norm",
                case=f"T={num_tokens}, y and its gradients",
                dtype=dtype,
                bar=bar,
                run=partial(_norm_error, setting, num_tokens, dtype),
            )
    for num_tokens in (1, 300):
        for part in ("results", "gradients"):
            yield CheckCase(
                op="linear_logprobs",
                case=f"T={num_tokens} {part}",
                dtype=torch.bfloat16,
                bar=LOGPROB_BAR if part == "results" else BARS[torch.bfloat16],
                run=partial(_logprob_error, setting, num_tokens, part),
            )
    for num_tokens in (8, 300):
        yield CheckCase(
            op="moe",
            case=f"T={num_tokens}, y and its gradients",
            dtype=torch.bfloat16,
            bar=EXPERTS_BAR,
            run=partial(_experts_error, setting, num_tokens),
        )


def _total_errors(got: Tensors, wanted: Tensors) -> list[float]:
    """Relative errors of whole tensors: there are no heads here."""
    return [worst_error(a[None], b[None], head_dim=0) for a, b in zip(got, wanted, strict=True)]


def _with_gradients(
    function: Callable[[Tensors], Tensors], inputs: Tensors, incoming: Tensors
) -> list[Tensor]:
    """The results, then the gradients of the inputs."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    results = list(function(leaves))
    grads = [g.to(r.dtype) for g, r in zip(incoming, results, strict=True)]
    return [r.detach() for r in results] + list(torch.autograd.grad(results, leaves, grads))


def _compare(
    ours: Callable[[Tensors], Tensors],
    exact: Callable[[Tensors], Tensors],
    inputs: Tensors,
    incoming: Tensors,
) -> list[float]:
    """Errors of the results, then of the gradients."""
    got = _with_gradients(ours, inputs, incoming)
    return _total_errors(got, _with_gradients(exact, [t.double() for t in inputs], incoming))


def _normal(setting: Setting, *shape: int) -> Tensor:
    generator = torch.Generator(setting.device).manual_seed(shape[0])
    return torch.randn(shape, generator=generator, device=setting.device)


def _norm_error(setting: Setting, num_tokens: int, dtype: torch.dtype) -> float:
    channels = 8192 if setting.is_large else 256
    x, gate, dy = _normal(setting, 3, num_tokens, channels).to(dtype)
    weight = (1 + 0.1 * _normal(setting, channels)).to(dtype)

    def ours(leaves: Tensors) -> Tensors:
        return [gated_rms_norm(leaves[0], leaves[1], leaves[2])]

    def exact(leaves: Tensors) -> Tensors:
        x_TI, gate_TI, weight_I = leaves
        scale_T1 = torch.rsqrt(x_TI.pow(2).mean(-1, keepdim=True) + 1e-6)
        return [x_TI * scale_T1 * weight_I * torch.sigmoid(gate_TI)]

    return worst(_compare(ours, exact, [x, gate, weight], [dy]))


def _logprob_error(setting: Setting, num_tokens: int, part: str) -> float:
    vocab, hidden = (200_064, 6144) if setting.is_large else (1000, 64)
    h_TE = _normal(setting, num_tokens, hidden).bfloat16()
    w_VE = (2 * _normal(setting, vocab, hidden) * hidden**-0.5).bfloat16()
    target_T = torch.randint(vocab, (num_tokens,), device=setting.device)
    incoming = list(_normal(setting, 2, num_tokens))

    def ours(leaves: Tensors) -> Tensors:
        return linear_logprobs(leaves[0], leaves[1], target_T)

    def exact(leaves: Tensors) -> Tensors:
        logprob_TV = torch.log_softmax(leaves[0] @ leaves[1].T, dim=-1)
        entropy_T = -(logprob_TV.exp() * logprob_TV).sum(-1)
        return [logprob_TV.gather(1, target_T[:, None]).squeeze(1), entropy_T]

    errors = _compare(ours, exact, [h_TE, w_VE], incoming)
    return worst(errors[:2] if part == "results" else errors[2:])


def _experts_error(setting: Setting, num_tokens: int) -> float:
    hidden, inner, num_experts = (1024, 1536, 32) if setting.is_large else (32, 48, 4)
    x_TE = _normal(setting, num_tokens, hidden).bfloat16()
    w13 = (_normal(setting, num_experts, 2 * inner, hidden) * hidden**-0.5).bfloat16()
    w2 = (_normal(setting, num_experts, hidden, inner) * inner**-0.5).bfloat16()
    chosen_TP = _normal(setting, num_tokens, num_experts).topk(2).indices
    weight_TP = torch.rand(num_tokens, 2, device=setting.device)
    dy_TE = _normal(setting, num_tokens, hidden).bfloat16()

    def ours(leaves: Tensors) -> Tensors:
        x, first, second, weight = leaves
        return [grouped_experts(x, first, second, weight, chosen_TP)]

    def exact(leaves: Tensors) -> Tensors:
        x, first, second, weight = leaves
        y = torch.zeros_like(x)
        for expert in range(num_experts):
            a, b = (x @ first[expert].T).chunk(2, dim=-1)
            share_T1 = (weight * (chosen_TP == expert)).sum(-1, keepdim=True)
            y = y + share_T1 * ((F.silu(a) * b) @ second[expert].T)
        return [y]

    return worst(_compare(ours, exact, [x_TE, w13, w2, weight_TP], [dy_TE]))
