"""What the journal keeps of a choice: ids, logprobs and versions as the engine gave them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from m1serve.store.records import TurnRecord, TurnsDelivered
from m1serve.types import Mode

if TYPE_CHECKING:
    from m1serve.api.choice import ChoiceStream
    from m1serve.api.exchange import Exchange


def turn_record(exchange: Exchange, choice: ChoiceStream, *, total_ms: float) -> TurnRecord:
    """`choice` has stopped; whether it reached the client is told later."""
    assert choice.stop is not None
    serving, prepared = exchange.serving, exchange.prepared
    request, asked = prepared.generate, prepared.labels
    sampled = choice.sampled_logprobs
    # the choices of one request answer one prompt: they are a group whatever the client says
    group_key = asked.group_key or (request.id if request.n > 1 else None)
    return TurnRecord(
        turn_id=choice.turn_id,
        request_id=request.id,
        session_id=prepared.session_id,
        group_key=group_key,
        task_id=asked.task_id,
        tenant_id=prepared.caller.tenant_id,
        key_id=prepared.caller.key_id,
        model_id=serving.settings.model.model_id,
        mode=asked.mode,
        consent=asked.mode is Mode.TRAIN,
        created_at=prepared.created_at,
        choice=choice.index,
        num_choices=request.n,
        history_rule=prepared.history_rule,
        request_hash=prepared.request_hash,
        retry_count=prepared.retry_count,
        prompt_ids=request.prompt_ids,
        completion_ids=tuple(choice.token_ids),
        logprobs=tuple(choice.logprobs),
        sampled_logprobs=None if sampled is None else tuple(sampled),
        token_flags=tuple(choice.token_flags),
        version_spans=tuple(choice.spans),
        sampling=request.sampling,
        stop=choice.stop,
        stop_detail=choice.stop_detail,
        finish_reason=choice.finish_reason,
        was_delivered=False,
        cached_tokens=exchange.cached_tokens,
        tokenizer_digest=serving.tokenizer.digest,
        template_digest=serving.template_digest,
        numerics_digest=serving.numerics_digest,
        ttft_ms=exchange.ttft_ms,
        total_ms=total_ms,
        session_source=prepared.placement.source,
    )


def delivery_record(exchange: Exchange) -> TurnsDelivered:
    return TurnsDelivered(
        session_id=exchange.prepared.session_id,
        tenant_id=exchange.prepared.caller.tenant_id,
        turn_ids=tuple(choice.turn_id for choice in exchange.choices),
    )
