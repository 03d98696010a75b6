"""What is asked of an engine and what it answers: requests, deltas, why a choice stopped."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag, StrEnum


class StopCause(StrEnum):
    """Why an engine stopped a choice. `tool_calls` is an API finish reason, never a stop cause."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CONTEXT = "context"
    REPETITION = "repetition"
    ABORT = "abort"
    ERROR = "error"


class TokenFlag(IntFlag):
    """How a token came to be. Only a token that is SAMPLED and nothing else can be trained on."""

    SAMPLED = 1
    FORCED = 2
    MASKED = 4


class GrammarStart(StrEnum):
    """From where a grammar binds. What was said before stays free."""

    REPLY = "reply"
    """Behind the think block, or from the first token when the model opens none."""
    CALLS = "calls"
    """Behind a `<tool_calls>` tag outside the think block; a reply without one is free."""


class InFlight(StrEnum):
    """What a weight swap does to a running request."""

    FINISH = "finish"
    RECOMPUTE = "recompute"
    CARRY = "carry"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's own end-of-sentence token, which always stops."""

    @property
    def is_trainable(self) -> bool:
        """Temperature 1 and nothing that bends the distribution; top_p in [0.9, 1] is accepted."""
        return (
            self.temperature == 1.0
            and 0.9 <= self.top_p <= 1.0
            and self.top_k == 0
            and self.min_p == 0.0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and self.repetition_penalty == 1.0
            and not self.logit_bias
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionStop:
    """The paper's sign that a model is going round in circles: it has been sure for too long.

    `num_tokens` sampled tokens in a row, each with the model's own probability above `probability`
    (temperature 1, full vocabulary, whatever was sampled from). A forced token was not sampled: it
    neither counts nor breaks the run.
    """

    num_tokens: int = 3000
    probability: float = 0.99
    """At least 0, less than 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_tokens: int
    """Sampled tokens of one choice, think block included."""
    answer_tokens: int | None = None
    """Sampled tokens outside the think block; None means that only max_tokens bounds them."""
    reasoning_budget: int | None = None
    """Tokens between the tags of the think block, after which it is closed for the model."""
    repetition: RepetitionStop | None = RepetitionStop()
    """None lets it repeat itself."""
    deadline_s: float | None = None
    """Seconds from the request's arrival after which it is aborted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What a reply must look like. Tokens drawn under it carry TokenFlag.MASKED."""

    text: str
    """In llguidance's dialect of Lark; m1serve.chat.grammar writes it."""
    fallback: str | None = None
    """Taken when `text` does not compile: what was promised, where `text` tries for more."""
    start: GrammarStart = GrammarStart.REPLY
    param: str = "response_format"
    """The request's field to name when it does not compile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    id: str
    prompt_ids: tuple[int, ...]
    limits: Limits
    sampling: Sampling = Sampling()
    n: int = 1
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    stop_strings: tuple[str, ...] = ()
    grammar: Grammar | None = None
    weights_pin: str | None = None
    """A `weights_version` the engine must already hold; None means the newest."""
    in_flight: InFlight = InFlight.FINISH
    cache_salt: str = ""
    priority: int = 0
    """Higher goes first."""
    snapshot_at: tuple[int, ...] = ()
    """Prompt lengths that other prompts will share (the end of the system prefix)."""
    min_delta_interval_s: float = 0.0
    """Deltas may be merged for this long; `inf` asks for one delta a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The first item of every stream: the request holds its slots."""

    cached_tokens: int
    """Prompt tokens whose state came from a snapshot."""
    weights_version: str
    prompt_logprobs: tuple[float, ...] | None = None
    """Of prompt_ids[1:], when asked for."""
    prompt_top_logprobs: tuple[tuple[TopLogprob, ...], ...] | None = None
    """A row for each of them, when `top_logprobs` was asked for as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New tokens of one choice. All per-token streams have the length of `token_ids`."""

    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """fp32 log-softmax of the model at temperature 1 over the full vocabulary."""
    token_flags: tuple[int, ...]
    weights_version: str
    """Of every token in this delta."""
    sampled_logprobs: tuple[float, ...] | None = None
    """Under the distribution that was sampled from, where it differs from the model's own."""
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] = ()
    """One row a token when asked for, else empty."""
    stop: StopCause | None = None
    """Set on the last delta of the choice, which may have no tokens."""
    stop_detail: str | None = None
    """stop_token: its id. stop_string: the string. repetition: how many sampled tokens the run had.
    abort, error: why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    weights_version: str
    logprobs: tuple[float, ...]
    """logprobs[i] = log p(token_ids[i + 1] | token_ids[: i + 1])."""
