"""What an engine refuses at the door: pure checks of requests and swaps against its limits."""

from __future__ import annotations

from collections.abc import Sequence

from m1serve.engine.token_ids import TokenIds
from m1serve.errors import RequestError
from m1serve.types import (
    Capabilities,
    GenerateRequest,
    RepetitionStop,
    SwapReport,
    VersionRef,
)


def check_request(
    request: GenerateRequest, can: Capabilities, *, prompt: TokenIds | None = None
) -> None:
    """Raises RequestError for what this engine cannot do, before anything is queued.

    `prompt` has the request's ids as an array, which is quicker to look through.
    """
    check_prompt(prompt or request.prompt_ids, can)
    if len(request.prompt_ids) >= can.max_model_len and request.limits.max_tokens > 0:
        raise _too_long(len(request.prompt_ids), can.max_model_len)
    if request.n < 1:
        raise RequestError(f"n is {request.n}; wanted at least 1", param="n")
    if request.limits.max_tokens < 0:
        raise RequestError(
            f"max_tokens is {request.limits.max_tokens}; wanted 0 or more", param="max_tokens"
        )
    _check_repetition(request.limits.repetition)
    if not 0 <= request.top_logprobs <= can.max_top_logprobs:
        raise RequestError(
            f"top_logprobs is {request.top_logprobs}; wanted 0 to {can.max_top_logprobs}",
            param="top_logprobs",
        )
    _check_features(request, can)


def unknown_pin(pin: str, held: tuple[str, ...]) -> RequestError:
    return RequestError(
        f"weights {pin!r} are not held here; held are {list(held)}: "
        "drop the pin or load that version first",
        param="weights_pin",
        code="unknown_weights_version",
    )


def deferral(version: VersionRef, held: tuple[str, ...], max_held: int) -> SwapReport | None:
    """The report of a load for which there is no room yet; `held` ends with what serves."""
    if version.weights_version in held or len(held) < max_held:
        return None
    return SwapReport(
        weights_version=held[-1],
        is_accepted=False,
        is_deferred=True,
        reason=(
            f"{len(held)} versions are held ({', '.join(held)}) and no more than {max_held} may be "
            "(engine.max_held_versions): try again when the requests of the oldest have finished"
        ),
        phases_ms={},
    )


def _check_repetition(stop: RepetitionStop | None) -> None:
    if stop is not None and not (stop.num_tokens >= 1 and 0 <= stop.probability < 1):
        raise RequestError(
            f"a repetition stop of {stop.num_tokens} tokens with p > {stop.probability} cannot be; "
            "wanted 1 token or more and 0 <= p < 1, or None to switch it off",
            param="repetition_stop_tokens"
            if stop.num_tokens < 1
            else "repetition_stop_probability",
        )


def _check_features(request: GenerateRequest, can: Capabilities) -> None:
    sampling = request.sampling
    if request.grammar is not None and not can.has_grammar:
        raise RequestError(
            f"this engine does not constrain its output; leave {request.grammar.param} out",
            param=request.grammar.param,
            code="unsupported",
        )
    if request.in_flight not in can.in_flight:
        raise RequestError(
            f"in_flight={request.in_flight.value!r} is not supported; "
            f"this engine knows {sorted(mode.value for mode in can.in_flight)}",
            param="in_flight",
            code="unsupported",
        )
    has_penalty = (
        sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
    )
    if has_penalty and not can.has_penalties:
        raise RequestError("this engine has no penalties; leave them out", code="unsupported")
    if request.prompt_logprobs and not can.has_prompt_logprobs:
        raise RequestError("this engine gives no prompt logprobs", code="unsupported")
    limits = request.limits
    counts_thought = limits.reasoning_budget is not None or limits.answer_tokens is not None
    if counts_thought and not can.has_reasoning_budget:
        raise RequestError(
            "this engine does not count the think block by itself; leave out what bounds reasoning "
            "or the answer alone",
            param=None if limits.reasoning_budget is None else "reasoning_budget",
            code="unsupported",
        )
    for token_id in (*sampling.stop_token_ids, *(token for token, _ in sampling.logit_bias)):
        if not 0 <= token_id < can.vocab_size:
            raise RequestError(
                f"token id {token_id} is not in the vocabulary of {can.vocab_size}",
                param="logit_bias",
            )


def check_prompt(ids: Sequence[int] | TokenIds, can: Capabilities) -> None:
    """Raises RequestError for a prompt that this engine cannot read."""
    if not len(ids):
        raise RequestError("the prompt has no tokens; send at least one message", param="messages")
    if len(ids) > can.max_model_len:
        raise _too_long(len(ids), can.max_model_len)
    lowest, highest = ids.bounds if isinstance(ids, TokenIds) else (min(ids), max(ids))
    if lowest < 0 or highest >= can.vocab_size:
        raise RequestError(
            f"the prompt has token ids in [{lowest}, {highest}]; "
            f"the vocabulary is [0, {can.vocab_size}): use the model's own tokenizer",
            param="messages",
        )


def _too_long(num_tokens: int, max_model_len: int) -> RequestError:
    return RequestError(
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt has "
        f"{num_tokens} tokens and leaves no room for an answer. Shorten the prompt.",
        param="messages",
        code="context_length_exceeded",
    )
