"""Sampling and limits of a request, checked against what the engine can do. Pure."""

from __future__ import annotations

from m1serve.api.schema import ChatRequest
from m1serve.config import ModelSettings
from m1serve.errors import RequestError
from m1serve.types import Capabilities, Limits, Sampling

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 256
MAX_BIAS_TOKENS = 1024


def to_sampling(request: ChatRequest, model: ModelSettings, vocab_size: int) -> Sampling:
    def given(value: float | None, default: float) -> float:
        return default if value is None else float(value)

    return Sampling(
        temperature=given(request.temperature, model.temperature),
        top_p=given(request.top_p, model.top_p),
        top_k=max(0, request.top_k or 0),
        min_p=given(request.min_p, 0.0),
        presence_penalty=given(request.presence_penalty, 0.0),
        frequency_penalty=given(request.frequency_penalty, 0.0),
        repetition_penalty=given(request.repetition_penalty, 1.0),
        seed=request.seed,
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        stop_token_ids=_stop_token_ids(request.stop_token_ids or [], vocab_size),
    )


def to_stop_strings(request: ChatRequest) -> tuple[str, ...]:
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    is_fine = len(stop) <= MAX_STOP_STRINGS and all(0 < len(s) <= MAX_STOP_CHARS for s in stop)
    if not is_fine:
        raise RequestError(
            f"stop takes up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters, "
            f"got {len(stop)} of lengths {sorted({len(s) for s in stop})}",
            param="stop",
        )
    return tuple(stop)


def to_top_logprobs(request: ChatRequest, capabilities: Capabilities) -> int:
    wanted = request.top_logprobs or 0
    if wanted and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    if wanted > capabilities.max_top_logprobs:
        raise RequestError(
            f"top_logprobs is {wanted}; this engine gives at most {capabilities.max_top_logprobs}",
            param="top_logprobs",
        )
    return wanted


def to_limits(request: ChatRequest, model: ModelSettings, *, room: int, num_prompt: int) -> Limits:
    """`room` is the model's context length; a named maximum must fit beside the prompt."""
    named = request.max_completion_tokens or request.max_tokens
    if num_prompt + (named or 1) > room:
        asked = f"{num_prompt} in the messages, {named or 'at least 1'} in the completion"
        raise RequestError(
            f"This model's maximum context length is {room} tokens. However, you requested "
            f"{num_prompt + (named or 1)} tokens ({asked}). Reduce the messages or the completion.",
            param="messages" if num_prompt >= room else "max_tokens",
            code="context_length_exceeded",
        )
    return Limits(max_tokens=named or min(model.max_tokens, room - num_prompt))


def refuse_unsupported(request: ChatRequest, max_n: int) -> None:
    """OpenAI features that would change the answer and that this server does not have."""
    if (request.n or 1) > max_n:
        raise RequestError(f"n is {request.n}; this server gives at most {max_n}", param="n")
    if request.response_format is not None and request.response_format.type != "text":
        raise RequestError(
            f"response_format {request.response_format.type!r} is not supported; only 'text' is",
            param="response_format",
        )
    if request.parallel_tool_calls is False:
        raise RequestError(
            "parallel_tool_calls: false is not supported; leave it out and use the first call",
            param="parallel_tool_calls",
        )
    if request.modalities not in (None, ["text"]):
        raise RequestError(f"modalities {request.modalities} are not text", param="modalities")
    for name in ("functions", "function_call", "audio", "web_search_options"):
        if getattr(request, name) not in (None, [], "auto", "none"):
            raise RequestError(f"{name} is not supported; use tools", param=name)


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
