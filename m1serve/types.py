"""The vocabulary of m1serve: what engines, the ledger, scorers and the trainer say to each other.

Standard library only. Every value is frozen and picklable; the streams of one turn are all as long
as its token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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


class Mode(StrEnum):
    """What may happen to a turn: train it, only measure with it, or keep nothing but counters."""

    TRAIN = "train"
    EVAL = "eval"
    OFF = "off"


class HistoryRule(StrEnum):
    EXACT = "exact"
    TEMPLATE = "template"


class Drift(StrEnum):
    """How a turn's prompt relates to the turns before it in its session."""

    ROOT = "root"
    EXTEND = "extend"
    REWRITE_LAST = "rewrite_last"
    EDIT = "edit"
    FORK = "fork"
    SIDE = "side"


class VersionState(StrEnum):
    CANDIDATE = "candidate"
    VERIFIED = "verified"
    GATED = "gated"
    CANARY = "canary"
    ACTIVE = "active"
    RETIRED = "retired"
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"


class Slot(StrEnum):
    STABLE = "stable"
    CANARY = "canary"
    EVAL = "eval"


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
class Limits:
    max_tokens: int
    """Sampled tokens of one choice, think block included."""
    answer_tokens: int | None = None
    """Sampled tokens outside the think block; None means that only max_tokens bounds them."""
    reasoning_budget: int | None = None
    """Tokens between the tags of the think block, after which it is closed for the model."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    weights_version: str
    logprobs: tuple[float, ...]
    """logprobs[i] = log p(token_ids[i + 1] | token_ids[: i + 1])."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRef:
    weights_version: str
    """`<model_id>@<n>`"""
    path: str
    """The version directory, with `serving/` in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport:
    weights_version: str
    """What serves now: the new version when accepted, the old one when not."""
    is_accepted: bool
    reason: str
    """'' when accepted; else what was wrong with the candidate."""
    phases_ms: Mapping[str, float]
    """stage, verify, switch; milliseconds"""
    parity_mean: float | None = None
    """Mean |logprob - golden logprob| over the manifest's golden sequences."""
    parity_max: float | None = None
    is_deferred: bool = False
    """Not accepted and nothing is wrong with it: no room to hold it yet, load it again later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    max_model_len: int
    vocab_size: int
    max_top_logprobs: int
    in_flight: frozenset[InFlight]
    has_prompt_logprobs: bool
    has_grammar: bool
    has_penalties: bool
    has_reasoning_budget: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    num_running: int
    num_waiting: int
    num_slots: int
    versions: tuple[str, ...]
    """Held at this moment, newest last."""
    sampled_tokens: int
    """Since start, as the next three."""
    prefilled_tokens: int
    cached_tokens: int
    num_swaps: int
    num_preemptions: int = 0
    """Sequences that gave their memory back and read everything again later."""
    prefix_lookups: int = 0
    """Sequences that looked for a snapshot to start from."""
    prefix_hits: int = 0
    num_snapshots: int = 0
    """Kept at this moment, as the next three."""
    snapshot_bytes: int = 0
    num_pages: int = 0
    """Of keys and values, in all."""
    num_free_pages: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    name: str
    arguments: str
    """JSON text of an object, exactly as the model wrote it."""
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) of a completion were sampled from `weights_version`."""

    start: int
    end: int
    weights_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One assistant turn as a scorer sees it: decoded from the ledger, not a client's text."""

    turn_id: str
    text: str
    """Everything the model wrote, markup included, end-of-sentence excluded."""
    reasoning: str | None
    content: str
    tool_calls: tuple[ToolCall, ...]
    is_well_formed: bool
    """At most one leading think block; call lines are JSON objects with name and arguments."""
    stop: StopCause
    num_tokens: int


class RewardStatus(StrEnum):
    OK = "ok"
    UNCOMPUTABLE = "uncomputable"
    TIMEOUT = "timeout"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    value: float | None
    """None when it could not be computed; never 0 in its place."""
    status: RewardStatus = RewardStatus.OK
    components: Mapping[str, float] = field(default_factory=dict)
    evidence: str = ""
    """What the scorer saw, for a person to read."""
