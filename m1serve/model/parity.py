"""Do training and serving agree on the same tokens? Log-probabilities, layers, experts; pure torch.

Serving reads a prompt in chunks into pages and goes on token by token, as the engine does;
training is one forward over all tokens that records gradients. Both on one device in one dtype.
Shapes: B rows, T tokens, P prompt tokens, E hidden, V vocabulary; N tokens of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from m1serve.model.config import SOFTMAX, M1Config
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.paged import KeyPages, PagedState, Span
from m1serve.model.parity_trace import Trace, traced
from m1serve.model.state import SequenceState

_HEAD_TOKENS = 512
"""Whose logits exist at one time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Of two log-probabilities for each of the same tokens."""

    r: float
    """Pearson correlation of the probabilities (not their logarithms), as the report's Figure 3;
    NaN when one side is constant, as a single token's is."""
    mean_abs_dlogp: float
    max_abs_dlogp: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAgreement:
    layer: int
    kind: str
    """lightning or softmax"""
    prefill_error: float
    """|training - serving| / |training| of what leaves the layer, over the prompt's tokens"""
    decode_error: float
    """The same over the tokens that were decoded one by one; NaN where none was."""
    flip_rate: float
    """Share of all tokens that reach other experts in one mode than in the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    num_tokens: int
    """That log-probabilities are compared of: the rows' tokens behind their prompts."""
    entropy: float
    """Mean of the distributions they were drawn from, nats: near log V nothing can be seen."""
    fp32_head: Agreement
    bf16_head: Agreement
    layers: tuple[LayerAgreement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What serving made of prompts."""

    ids_BT: Tensor
    """The prompts and what was drawn behind them."""
    hidden_BTE: Tensor
    """Final normed hidden states of all but the last token."""
    trace: Trace


@torch.no_grad()
def serve(
    model: M1ForCausalLM,
    prompt_BP: Tensor,
    num_new: int,
    *,
    chunks: Sequence[int],
    generator: torch.Generator,
) -> Served:
    """Draws `num_new` tokens a row at temperature 1, as the engine does.

    `chunks` are the lengths the prompt is read in and add up to P (ValueError otherwise);
    `generator` is on the model's device.
    """
    if sum(chunks) != prompt_BP.shape[1] or min(chunks, default=0) < 1 or num_new < 1:
        raise ValueError(
            f"chunks {list(chunks)} of a prompt of {prompt_BP.shape[1]} tokens and {num_new} "
            "tokens behind it, wanted chunks that add up to the prompt and at least one token"
        )
    model.eval()
    (B, P), weight = prompt_BP.shape, model.lm_head.weight
    state = paged_state(model.config, B, P + num_new, device=weight.device, dtype=weight.dtype)
    hidden: list[Tensor] = []
    ids = [prompt_BP]
    with traced(model) as trace:
        start = 0
        for piece_BT in torch.split(prompt_BP, list(chunks), 1):
            state.spans = (Span(start=start, num_tokens=piece_BT.shape[1]),) * B
            hidden.append(model.hidden(piece_BT, state)[0])
            start += piece_BT.shape[1]
        for left in range(num_new, 0, -1):
            p_BV = torch.softmax(model.logits(hidden[-1][:, -1]), -1)
            ids.append(torch.multinomial(p_BV, 1, generator=generator))
            if left > 1:
                hidden.append(model.hidden(ids[-1], state)[0])
    return Served(ids_BT=torch.cat(ids, 1), hidden_BTE=torch.cat(hidden, 1), trace=trace)


def paged_state(
    config: M1Config, num_rows: int, capacity: int, *, device: torch.device, dtype: torch.dtype
) -> PagedState:
    """Rows that have read nothing, with pages for `capacity` tokens each, as an engine's pool."""
    page_tokens = 256 if device.type == "cuda" else 32
    pages_a_row = -(-capacity // page_tokens)
    num_pages = num_rows * pages_a_row
    empty = SequenceState.allocate(config, num_rows, 0, device=device)
    page_N = torch.arange(num_pages, dtype=torch.int32, device=device)
    return PagedState(
        lightning=empty.lightning,
        keys={},
        values={},
        length_B=empty.length_B,
        fixed_capacity=True,
        pages=KeyPages.allocate(config, num_pages, page_tokens, device=device, dtype=dtype),
        page_BM=page_N.view(num_rows, pages_a_row),
    )


def train_forward(model: M1ForCausalLM, ids_BT: Tensor) -> tuple[Tensor, Trace]:
    """Hidden states of one packed forward that records gradients, as a training step's does."""
    was_training = model.training
    with torch.enable_grad(), traced(model.train()) as trace:
        hidden_BTE = model.hidden(ids_BT)[0].detach()
    model.train(was_training)
    return hidden_BTE, trace


def measure_parity(model: M1ForCausalLM, served: Served, *, prompt: int) -> ParityReport:
    """Runs the training forward over what was served; `prompt` tokens a row are not judged."""
    trained_BTE, trace = train_forward(model, served.ids_BT[:, :-1])
    token_N = served.ids_BT[:, prompt:].flatten()
    trained_NE, served_NE = (
        h_BTE[:, prompt - 1 :].flatten(0, 1) for h_BTE in (trained_BTE, served.hidden_BTE)
    )
    with torch.no_grad():
        training = model.token_logprobs(trained_NE, token_N)
        serving_N = logprobs_of_logits(model, served_NE, token_N)
        weight_VE = model.lm_head.weight
        rounded = [bf16_head_logprobs(h, weight_VE, token_N) for h in (trained_NE, served_NE)]
    return ParityReport(
        num_tokens=len(token_N),
        entropy=training.entropy_T.mean().item(),
        fp32_head=agreement(training.logprob_T, serving_N),
        bf16_head=agreement(*rounded),
        layers=_layers(model, trace, served.trace, prompt),
    )


def chunk_lengths(num_tokens: int, chunk: int) -> list[int]:
    """Full chunks and what is left."""
    full, rest = divmod(num_tokens, chunk)
    return [chunk] * full + [rest] * bool(rest)


def agreement(training_N: Tensor, serving_N: Tensor) -> Agreement:
    """Of log-probabilities; sums in float64."""
    a_N, b_N = training_N.double(), serving_N.double()
    gap_N = (a_N - b_N).abs()
    return Agreement(
        r=_correlation(a_N.exp(), b_N.exp()),
        mean_abs_dlogp=gap_N.mean().item(),
        max_abs_dlogp=gap_N.max().item(),
    )


def _correlation(a_N: Tensor, b_N: Tensor) -> float:
    if len(a_N) < 2:
        return math.nan
    return torch.corrcoef(torch.stack([a_N, b_N]))[0, 1].item()


def logprobs_of_logits(model: M1ForCausalLM, hidden_NE: Tensor, token_N: Tensor) -> Tensor:
    """[N] as a sampler computes them: log_softmax of fp32 logits."""
    parts = _few_at_a_time(hidden_NE, token_N)
    return torch.cat([_picked(model.logits(h), token) for h, token in parts])


def bf16_head_logprobs(hidden_NE: Tensor, weight_VE: Tensor, token_N: Tensor) -> Tensor:
    """[N] with logits rounded to bf16: what the report gave up. Never used to serve or to train."""
    weight_VE = weight_VE.bfloat16()
    parts = _few_at_a_time(hidden_NE, token_N)
    return torch.cat([_picked(F.linear(h.bfloat16(), weight_VE), token) for h, token in parts])


def _few_at_a_time(hidden_NE: Tensor, token_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(
        torch.split(hidden_NE, _HEAD_TOKENS), torch.split(token_N, _HEAD_TOKENS), strict=True
    )


def _picked(logits_NV: Tensor, token_N: Tensor) -> Tensor:
    logp_NV = torch.log_softmax(logits_NV.float(), -1)
    return logp_NV.gather(-1, token_N[:, None]).squeeze(-1)


def _layers(
    model: M1ForCausalLM, training: Trace, serving: Trace, prompt: int
) -> tuple[LayerAgreement, ...]:
    kinds = model.config.attn_type_list
    layers = []
    for layer, kind in enumerate(kinds):
        a_BTE, b_BTE = training.after(layer), serving.after(layer)
        same_BT = (training.experts(layer) == serving.experts(layer)).all(-1)
        layers.append(
            LayerAgreement(
                layer=layer,
                kind="softmax" if kind == SOFTMAX else "lightning",
                prefill_error=_relative(a_BTE[:, :prompt], b_BTE[:, :prompt]),
                decode_error=_relative(a_BTE[:, prompt:], b_BTE[:, prompt:]),
                flip_rate=1 - same_BT.double().mean().item(),
            )
        )
    return tuple(layers)


def _relative(wanted: Tensor, got: Tensor) -> float:
    if not wanted.numel():
        return math.nan
    wanted, got = wanted.float(), got.float()
    error: float = ((wanted - got).norm() / wanted.norm()).item()
    return error
