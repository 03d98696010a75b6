"""From the bytes of a request to what the engine gets: parse, label, render. CPU only, no I/O."""

from __future__ import annotations

import hashlib
import math
import uuid
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from m1serve.api.constraints import to_grammar
from m1serve.api.conversation import to_messages, to_tools
from m1serve.api.defaults import AnswerDefaults
from m1serve.api.identity import Caller, Labels, labels
from m1serve.api.lookalikes import Asker, Placement
from m1serve.api.sampling import (
    refuse_unsupported,
    to_limits,
    to_sampling,
    to_stop_strings,
    to_top_logprobs,
)
from m1serve.api.schema import ChatRequest, CompletionRequest, GenerationFields, parse_body
from m1serve.api.serving import Serving
from m1serve.api.session_index import Question
from m1serve.chat.chain import Chain, chain_of
from m1serve.chat.history import HistoryMatch
from m1serve.chat.messages import ChatMessage
from m1serve.chat.template import RenderedPrompt, encode_prompt
from m1serve.types import GenerateRequest, Grammar, HistoryRule

STREAM_DELTA_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One validated prompt of a request."""

    request_id: str
    created_at: float
    caller: Caller
    labels: Labels
    placement: Placement = field(repr=False)
    """Its session: named by the client, else of the conversation it goes on with, else new."""
    chain: Chain = field(repr=False)
    retry_count: int
    request_hash: str
    body: ChatRequest | CompletionRequest = field(repr=False)
    defaults: AnswerDefaults = field(repr=False)
    messages: tuple[ChatMessage, ...] = field(repr=False)
    """Empty for raw text: then no message is parsed from the answer and none is remembered."""
    tools: tuple[dict[str, object], ...] = field(repr=False)
    history_rule: HistoryRule
    packed_ids: array[int] | None = field(repr=False)
    """The prompt's ids as the history keeps them; None under `template`."""
    system_end: int
    generate: GenerateRequest = field(repr=False)

    @property
    def session_id(self) -> str:
        return self.placement.session_id

    @property
    def is_stream(self) -> bool:
        return bool(self.body.stream)

    @property
    def wants_usage_chunk(self) -> bool:
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)


def prepare(
    serving: Serving,
    body: bytes,
    headers: Mapping[str, str],
    *,
    caller: Caller,
    request_id: str,
    created_at: float,
) -> Prepared:
    """Raises RequestError for anything the client has to change."""
    request = parse_body(ChatRequest, body)
    defaults = serving.defaults_of(request.model)
    refuse_unsupported(request, serving.settings.serve.max_n)
    asked = labels(headers, request.metadata or {}, is_stored=request.store is not False)
    messages, tools = to_messages(request), to_tools(request)
    grammar = to_grammar(request, serving.engine.capabilities)
    chain = chain_of(caller.tenant_id, request.model, messages, tools)
    question = Question(
        asker=asker_of(request, caller, asked),
        session_id=asked.session_id,
        retry_count=retry_count_of(headers),
        messages=messages,
        chain=chain,
    )
    placement = serving.sessions.find(question)
    match = _prompt(serving, request, question, placement.session_id, tools)
    return Prepared(
        request_id=request_id,
        created_at=created_at,
        caller=caller,
        labels=asked,
        placement=placement,
        chain=chain,
        retry_count=question.retry_count,
        request_hash=placement.asker.request_hash,
        body=request,
        defaults=defaults,
        messages=messages,
        tools=tools,
        history_rule=defaults.history,
        packed_ids=match.packed_ids,
        system_end=match.prompt.system_end,
        generate=engine_request(
            serving, request, match.prompt, caller=caller, request_id=request_id, grammar=grammar
        ),
    )


def _prompt(
    serving: Serving,
    request: ChatRequest,
    question: Question,
    session_id: str,
    tools: tuple[dict[str, object], ...],
) -> HistoryMatch:
    if serving.defaults_of(request.model).history is HistoryRule.EXACT:
        return serving.history.match(
            question.asker.tenant_id,
            request.model,
            question.messages,
            tools,
            session_id=session_id,
            chain=question.chain,
        )
    prompt = encode_prompt(serving.tokenizer, question.messages, tools)
    return HistoryMatch(prompt=prompt, parent_session_id=None, num_exact_ids=0)


def engine_request(
    serving: Serving,
    request: GenerationFields,
    prompt: RenderedPrompt,
    *,
    caller: Caller,
    request_id: str,
    grammar: Grammar | None = None,
) -> GenerateRequest:
    """Raises RequestError for what the model has no room for or the engine cannot do."""
    capabilities, defaults = serving.engine.capabilities, serving.defaults_of(request.model)
    ids, system_end = prompt.ids, prompt.system_end
    room = capabilities.max_model_len
    return GenerateRequest(
        # a proxy or client may name two requests alike; the engine and the ledger must not
        id=f"{request_id}-{uuid.uuid4().hex[:8]}",
        prompt_ids=ids,
        sampling=to_sampling(request, defaults, capabilities.vocab_size),
        limits=to_limits(request, defaults, room=room, num_prompt=len(ids)),
        n=request.n or 1,
        top_logprobs=to_top_logprobs(request, capabilities),
        prompt_logprobs=request.scores_prompt,
        stop_strings=to_stop_strings(request),
        grammar=grammar,
        cache_salt=caller.cache_salt,
        snapshot_at=(system_end,) if 0 < system_end < len(ids) else (),
        min_delta_interval_s=STREAM_DELTA_INTERVAL_S if request.stream else math.inf,
    )


def asker_of(request: GenerationFields, caller: Caller, asked: Labels) -> Asker:
    hints = {"user": request.user, "task": asked.task_id, "group": asked.group_key}
    return Asker(
        tenant_id=caller.tenant_id,
        key_id=caller.key_id,
        request_hash=_request_hash(request),
        hints={name: value for name, value in hints.items() if value is not None},
    )


def _request_hash(request: GenerationFields) -> str:
    transport = {"stream", "stream_options", "metadata", "store", "user"}
    return hashlib.sha256(
        request.model_dump_json(exclude=transport, exclude_none=True).encode()
    ).hexdigest()


def retry_count_of(headers: Mapping[str, str]) -> int:
    text = headers.get("x-stainless-retry-count", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
