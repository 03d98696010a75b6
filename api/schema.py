"""What clients may send. Types are strict; OpenAI fields that we do not use are ignored."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from m1serve.errors import RequestError

Body = TypeVar("Body", bound=BaseModel)
Ignored = Any
"""A field OpenAI has that does not change what this server answers."""


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
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class FunctionSpec(_Lenient):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Lenient):
    """OpenAI's wrapper, or the flat form of MiniMax's guide."""

    type: str = "function"
    function: FunctionSpec | None = None
    name: str | None = Field(default=None, min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: Ignored = None


class ResponseFormat(_Lenient):
    type: str


class ChatRequest(_Strict):
    model: str
    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None

    # beyond OpenAI
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=2)
    stop_token_ids: list[int] | None = None
    return_token_ids: bool | None = None

    # OpenAI's, refused unless they say what we do anyway
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None

    # OpenAI's, ignored
    moderation: Ignored = None
    prediction: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    reasoning_effort: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    verbosity: Ignored = None


class FeedbackRequest(_Strict):
    value: float
    metric: str = Field(default="reward", min_length=1, max_length=128)
    session_id: str | None = Field(default=None, min_length=1, max_length=128)
    turn_id: str | None = Field(default=None, min_length=1, max_length=128)
    comment: str = Field(default="", max_length=8192)


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
