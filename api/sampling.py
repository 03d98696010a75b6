"""Sampling and limits of a request, checked against what the engine can do. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from m1serve.api.defaults import AnswerDefaults
from m1serve.api.schema import ChatRequest, GenerationFields
from m1serve.errors import RequestError
from m1serve.types import Capabilities, Limits, RepetitionStop, Sampling

_Value = TypeVar("_Value")

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 256
MAX_BIAS_TOKENS = 1024
MIN_TEMPERATURE = 1e-3
"""Below it logits would leave what fp32 holds, and the draw is greedy anyway."""


def to_sampling(request: GenerationFields, defaults: AnswerDefaults, vocab_size: int) -> Sampling:
    temperature = _given(request.temperature, defaults.temperature)
    return Sampling(
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_p=_given(request.top_p, defaults.top_p),
        top_k=min(max(0, request.top_k or 0), vocab_size),
        min_p=_given(request.min_p, 0.0),
        presence_penalty=_given(request.presence_penalty, 0.0),
        frequency_penalty=_given(request.frequency_penalty, 0.0),
        repetition_penalty=_given(request.repetition_penalty, 1.0),
        seed=request.seed,
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        stop_token_ids=_stop_token_ids(request.stop_token_ids or [], vocab_size),
    )


def to_stop_strings(request: GenerationFields) -> tuple[str, ...]:
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    is_fine = len(stop) <= MAX_STOP_STRINGS and all(0 < len(s) <= MAX_STOP_CHARS for s in stop)
    if not is_fine:
        raise RequestError(
            f"stop takes up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters, "
            f"got {len(stop)} of lengths {sorted({len(s) for s in stop})}",
            param="stop",
        )
    return tuple(stop)


def to_top_logprobs(request: GenerationFields, capabilities: Capabilities) -> int:
    wanted = request.num_top_logprobs
    if wanted and not request.shows_logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    if wanted > capabilities.max_top_logprobs:
        raise RequestError(
            f"top_logprobs is {wanted}; this engine gives at most {capabilities.max_top_logprobs}",
            param="top_logprobs",
        )
    return wanted


def to_limits(
    request: GenerationFields, defaults: AnswerDefaults, *, room: int, num_prompt: int
) -> Limits:
    """`room` is the model's context length; a maximum that does not fit beside the prompt is cut.

    The think block is part of max_tokens unless the name asked for bounds the answer only.
    """
    named = request.named_max_tokens
    left = room - num_prompt
    if left < (0 if named == 0 else 1):
        raise RequestError(
            f"This model's maximum context length is {room} tokens. However, your prompt has "
            f"{num_prompt} tokens and leaves no room for an answer. Shorten the prompt.",
            param=request.prompt_field,
            code="context_length_exceeded",
        )
    most = defaults.max_tokens if named is None else named
    limits = Limits(
        max_tokens=room,
        reasoning_budget=_given(request.reasoning_budget, defaults.reasoning_budget),
        repetition=_repetition(request, defaults),
    )
    # more than is left: the engine stops where the context ends, and says that it did
    if most is None or most > left:
        return limits
    if defaults.bounds_answer_only and most:
        return replace(limits, answer_tokens=most)
    return replace(limits, max_tokens=most)


def refuse_large_n(n: int, max_n: int) -> None:
    if n > max_n:
        raise RequestError(f"n is {n}; this server gives at most {max_n}", param="n")


def refuse_unsupported(request: ChatRequest, max_n: int) -> None:
    """OpenAI features that would change the answer and that this server does not have."""
    refuse_large_n(request.n or 1, max_n)
    if request.modalities not in (None, ["text"]):
        raise RequestError(f"modalities {request.modalities} are not text", param="modalities")
    for name in ("functions", "function_call", "audio", "web_search_options"):
        if getattr(request, name) not in (None, [], "auto", "none"):
            raise RequestError(f"{name} is not supported; use tools", param=name)


def _repetition(request: GenerationFields, defaults: AnswerDefaults) -> RepetitionStop | None:
    num_tokens = _given(request.repetition_stop_tokens, defaults.repetition_stop_tokens)
    probability = _given(request.repetition_stop_probability, defaults.repetition_stop_probability)
    return RepetitionStop(num_tokens=num_tokens, probability=probability) if num_tokens else None


def _given(value: _Value | None, default: _Value) -> _Value:
    return default if value is None else value


def _logit_bias(bias: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(bias) > MAX_BIAS_TOKENS:
        raise RequestError(
            f"logit_bias has {len(bias)} tokens; at most {MAX_BIAS_TOKENS}", param="logit_bias"
        )
    pairs: list[tuple[int, float]] = []
    for text, value in bias.items():
        is_token = text.isascii() and text.isdigit() and len(text) < 10 and int(text) < vocab_size
        if not is_token or not -100 <= value <= 100:
            raise RequestError(
                f"logit_bias {text!r}: {value} is refused; wanted token ids 0 to {vocab_size - 1} "
                "with values from -100 to 100",
                param="logit_bias",
            )
        pairs.append((int(text), value))
    return tuple(pairs)


def _stop_token_ids(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"stop_token_ids has {token_id}; wanted ids 0 to {vocab_size - 1}",
                param="stop_token_ids",
            )
    return tuple(ids)
