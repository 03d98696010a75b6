"""From the bytes of a text completion to what the engine gets, one entry a prompt. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from m1serve.api.identity import Caller, Labels, labels
from m1serve.api.prepare import Prepared, asker_of, engine_request, retry_count_of
from m1serve.api.sampling import refuse_large_n
from m1serve.api.schema import CompletionRequest, parse_body
from m1serve.api.serving import Serving
from m1serve.api.session_index import Question
from m1serve.chat.chain import chain_of
from m1serve.chat.template import RenderedPrompt
from m1serve.errors import RequestError
from m1serve.types import HistoryRule

MAX_CHOICES = 1024
"""Of one request: prompts times n."""


def prepare_completion(
    serving: Serving,
    body: bytes,
    headers: Mapping[str, str],
    *,
    caller: Caller,
    request_id: str,
    created_at: float,
) -> tuple[Prepared, ...]:
    """In the order of the prompts. Raises RequestError for anything the client has to change."""
    request = parse_body(CompletionRequest, body)
    serving.defaults_of(request.model)
    _refuse_unsupported(request, serving.settings.serve.max_n)
    prompts = _prompts(serving, request)
    asked = labels(headers, request.metadata or {}, is_stored=request.store is not False)
    ids = (request_id, *(f"{request_id}-{place}" for place in range(1, len(prompts))))
    return tuple(
        _prepare_one(serving, request, prompt, asked, caller, (name, created_at, headers))
        for name, prompt in zip(ids, prompts, strict=True)
    )


def _prepare_one(
    serving: Serving,
    request: CompletionRequest,
    prompt: tuple[int, ...],
    asked: Labels,
    caller: Caller,
    arrival: tuple[str, float, Mapping[str, str]],
) -> Prepared:
    request_id, created_at, headers = arrival
    # each prompt is a request of its own, to the ledger as to the engine
    alone = request.model_copy(update={"prompt": list(prompt)})
    question = Question(
        asker=asker_of(alone, caller, asked),
        session_id=asked.session_id,
        retry_count=retry_count_of(headers),
        messages=(),
        chain=chain_of(caller.tenant_id, request.model, (), ()),
        model=request.model,
        prompt_ids=prompt,
    )
    placement = serving.sessions.find(question)
    return Prepared(
        request_id=request_id,
        created_at=created_at,
        caller=caller,
        labels=asked,
        placement=placement,
        chain=question.chain,
        retry_count=question.retry_count,
        request_hash=placement.asker.request_hash,
        body=request,
        defaults=serving.defaults_of(request.model),
        messages=(),
        tools=(),
        # the ids are the client's own: nothing was rendered
        history_rule=HistoryRule.EXACT,
        packed_ids=None,
        system_end=0,
        generate=engine_request(
            serving,
            request,
            RenderedPrompt(ids=prompt, system_end=0),
            caller=caller,
            request_id=request_id,
        ),
    )


def _prompts(serving: Serving, request: CompletionRequest) -> list[tuple[int, ...]]:
    """Text becomes ordinary tokens whatever it says; ids are taken as they are."""
    given: Sequence[str | int | list[int]] = (
        [request.prompt] if isinstance(request.prompt, str) else request.prompt
    )
    many: list[str | list[int]] = []
    if given and isinstance(given[0], int):
        many = [[item for item in given if isinstance(item, int)]]
    else:
        many = [item for item in given if not isinstance(item, int)]
    if not many or not all(many):
        raise RequestError(
            "prompt is empty; send text, token ids, or a list of either, each with something in it",
            param="prompt",
        )
    if len(many) * (request.n or 1) > MAX_CHOICES:
        raise RequestError(
            f"{len(many)} prompts times n {request.n or 1} is more than {MAX_CHOICES} choices; "
            "send several requests",
            param="prompt",
        )
    return [_ids(serving, prompt) for prompt in many]


def _ids(serving: Serving, prompt: str | list[int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(serving.tokenizer.encode_text(prompt))
    size = serving.engine.capabilities.vocab_size
    if min(prompt) < 0 or max(prompt) >= size:
        raise RequestError(
            f"prompt has token ids from {min(prompt)} to {max(prompt)}; wanted 0 to {size - 1}",
            param="prompt",
        )
    return tuple(prompt)


def _refuse_unsupported(request: CompletionRequest, max_n: int) -> None:
    refuse_large_n(request.n or 1, max_n)
    if request.best_of not in (None, 1):
        raise RequestError(
            f"best_of is {request.best_of}; this server does not choose among answers: use n",
            param="best_of",
        )
    if request.suffix:
        raise RequestError("suffix is not supported; leave it out", param="suffix")
