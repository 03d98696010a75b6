"""What clients may send. Types are strict; fields of theirs that we do not know are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
)

from m1serve.errors import RequestError

Body = TypeVar("Body", bound=BaseModel)


MAX_ENTRIES = 1024
"""Of a table that a client sends."""
_Item = TypeVar("_Item")


def _small(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise ValueError(f"{len(value)} entries; wanted {MAX_ENTRIES} at most")
    return value


# a list of a million wrong items is one error: telling of all takes seconds and gigabytes
Listed = Annotated[list[_Item], Field(fail_fast=True)]
Small = Annotated[dict[str, _Item], BeforeValidator(_small)]


def _kind_of_prompt(value: object) -> str:
    """By its first item, so that only one form is tried."""
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, list):
        return "(lists of ids)"
    if isinstance(first, int):
        return "(ids)"
    return "(texts)" if isinstance(value, list) else "(text)"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class _Lenient(BaseModel):
    """History comes back with whatever fields a client's library added."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


class ContentPart(_Lenient):
    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    name: str | None = None
    """MiniMax's own form: several tool results in one tool message, each with its tool's name."""


class CalledFunction(_Lenient):
    name: str
    arguments: str | None = ""


class MessageToolCall(_Lenient):
    id: str | None = None
    function: CalledFunction


class Message(_Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Listed[ContentPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Listed[MessageToolCall] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: str | None = None
    name: str | None = None


class FunctionSpec(_Lenient):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Lenient):
    """OpenAI's wrapper, or the flat form of MiniMax's guide."""

    type: str = "function"
    function: FunctionSpec | None = None
    name: str | None = Field(default=None, min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class StreamOptions(_Lenient):
    """`include_obfuscation` and whatever else it holds is ignored."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Taken and not done: usage comes once, in the last chunk."""


class NamedSchema(_Lenient):
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Lenient):
    type: str
    json_schema: NamedSchema | None = None


class GenerationFields(_Lenient):
    """What chat and text completions have in common. Fields that nobody here knows are ignored."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: str | Listed[str] | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    logit_bias: Small[float] | None = None
    store: bool | None = None
    metadata: Small[str] | None = None
    user: str | None = None
    """An end user's name; nothing is done with it."""

    # beyond OpenAI
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.1, le=2)
    stop_token_ids: Listed[int] | None = None
    reasoning_budget: int | None = Field(default=None, ge=0)
    repetition_stop_tokens: int | None = Field(default=None, ge=0)
    """0 switches it off."""
    repetition_stop_probability: float | None = Field(default=None, ge=0, lt=1)
    return_token_ids: bool | None = None

    @property
    def named_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def prompt_field(self) -> str:
        """What a too long prompt is blamed on."""
        return "prompt"

    @property
    def shows_logprobs(self) -> bool:
        return False

    @property
    def num_top_logprobs(self) -> int:
        return 0

    @property
    def scores_prompt(self) -> bool:
        return False


class ChatRequest(GenerationFields):
    messages: Listed[Message] = Field(min_length=1)
    tools: Listed[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    # OpenAI's, refused unless they say what we do anyway
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: Listed[str] | None = None
    audio: Any = None
    web_search_options: Any = None

    @property
    def named_max_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def prompt_field(self) -> str:
        return "messages"

    @property
    def shows_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def num_top_logprobs(self) -> int:
        return self.top_logprobs or 0


class CompletionRequest(GenerationFields):
    prompt: Annotated[
        Annotated[str, Tag("(text)")]
        | Annotated[Listed[str], Tag("(texts)")]
        | Annotated[Listed[int], Tag("(ids)")]
        | Annotated[Listed[Listed[int]], Tag("(lists of ids)")],
        Discriminator(_kind_of_prompt),
    ]
    max_tokens: int | None = Field(default=None, ge=0)
    """0 says nothing; with `echo` and `logprobs` it scores the prompt."""
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=5)

    # OpenAI's, refused unless they say what we do anyway
    best_of: int | None = None
    suffix: str | None = None

    @property
    def shows_logprobs(self) -> bool:
        """0 shows the tokens' own."""
        return self.logprobs is not None

    @property
    def num_top_logprobs(self) -> int:
        return self.logprobs or 0

    @property
    def scores_prompt(self) -> bool:
        return bool(self.echo) and self.shows_logprobs


class RetrainRequest(_Strict):
    model_id: str | None = None
    trigger: str = Field(default="admin", min_length=1, max_length=64)
    overrides: dict[str, Any] = Field(default_factory=dict)


class PromoteRequest(_Strict):
    weights_version: str


class RollbackRequest(_Strict):
    model_id: str | None = None


def parse_body(kind: type[Body], body: bytes) -> Body:
    """Raises RequestError naming the field, what was wrong and what was got."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = _path(first["loc"])
        if first["type"] == "json_invalid":
            raise RequestError(f"the request body is no valid JSON: {first['msg']}") from None
        if first["type"] == "extra_forbidden":
            message = f"unknown field {param}: this server does not have it; leave it out"
        else:
            message = f"{param}: {first['msg']} (got {_shown(first['input'])})"
        raise RequestError(message, param=param or None) from None


def _path(places: tuple[int | str, ...]) -> str:
    """`messages[0].content`; the branches of a union are not shown."""
    path = ""
    for place in places:
        if isinstance(place, int):
            path += f"[{place}]"
        elif place.isidentifier() and place not in ("str", "float", "int", "bool"):
            path += f".{place}" if path else place
    return path


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
