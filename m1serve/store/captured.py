"""A captured turn made ready for the turns table: everything that needs its tokens, before any lock
is taken.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from m1serve.store.blobs import ids_to_bytes, pack_flags, pack_floats, pack_ids
from m1serve.store.codec import check_turn, sampling_to_dict
from m1serve.store.drift import TurnFacts
from m1serve.store.prompts import SplitPrompt, prefix_digests, split_prompt
from m1serve.store.records import TurnRecord
from m1serve.store.versions import version_number


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedTurn:
    writer: str
    seq: int
    record: TurnRecord
    session_key: str
    secret: bytes
    prompt: bytes
    """Little-endian int32."""
    split: SplitPrompt
    facts: TurnFacts
    """Not linked yet."""

    @property
    def last_seen_at(self) -> float:
        return self.record.created_at + self.record.total_ms / 1000


def session_key(tenant_id: str, session_id: str) -> str:
    return hashlib.sha256(f"{tenant_id}\0{session_id}".encode()).hexdigest()[:32]


def capture(writer: str, seq: int, record: TurnRecord, secret: bytes) -> CapturedTurn:
    check_turn(record)
    prompt = ids_to_bytes(record.prompt_ids)
    full = prompt + ids_to_bytes(record.completion_ids)
    num_prompt, num_full = len(prompt) // 4, len(full) // 4
    digests = prefix_digests(secret, full, sorted({num_prompt, num_full}))
    numbers = [version_number(span.weights_version) for span in record.version_spans]
    facts = TurnFacts(
        turn_id=record.turn_id,
        request_id=record.request_id,
        request_hash=record.request_hash,
        retry_count=record.retry_count,
        created_at=record.created_at,
        choice=record.choice,
        num_choices=record.num_choices,
        model_id=record.model_id,
        key_id=record.key_id,
        group_key=record.group_key,
        task_id=record.task_id,
        mode=record.mode,
        consent=record.consent,
        history_rule=record.history_rule,
        stop=record.stop,
        was_delivered=record.was_delivered,
        num_prompt=num_prompt,
        num_completion=num_full - num_prompt,
        num_trainable=sum(record.trainable_tokens()),
        prompt_digest=digests[num_prompt],
        full_digest=digests[num_full],
        min_version=min(numbers, default=None),
        max_version=max(numbers, default=None),
    )
    return CapturedTurn(
        writer=writer,
        seq=seq,
        record=record,
        session_key=session_key(record.tenant_id, record.session_id),
        secret=secret,
        prompt=prompt,
        split=split_prompt(secret, prompt),
        facts=facts,
    )


def turn_values(captured: CapturedTurn, facts: TurnFacts, now: float) -> dict[str, object]:
    """The row; `facts` are the linked ones."""
    record, split = captured.record, captured.split
    sampled = record.sampled_logprobs
    return {
        "turn_id": record.turn_id,
        "writer": captured.writer,
        "seq": captured.seq,
        "request_id": record.request_id,
        "session_key": captured.session_key,
        "session_id": record.session_id,
        "group_key": record.group_key,
        "task_id": record.task_id,
        "tenant_id": record.tenant_id,
        "key_id": record.key_id,
        "model_id": record.model_id,
        "mode": record.mode.value,
        "consent": record.consent,
        "created_at": record.created_at,
        "ingested_at": now,
        "choice": record.choice,
        "num_choices": record.num_choices,
        "history_rule": record.history_rule.value,
        "request_hash": record.request_hash,
        "retry_count": record.retry_count,
        "session_source": record.session_source.value,
        "parent_turn_id": facts.parent_turn_id,
        "drift": facts.drift.value,
        "shared_tokens": facts.shared_tokens,
        "superseded_by": facts.superseded_by,
        "num_prompt": facts.num_prompt,
        "num_completion": facts.num_completion,
        "num_trainable": facts.num_trainable,
        "prompt_digest": facts.prompt_digest,
        "full_digest": facts.full_digest,
        "prompt_blocks": split.block_ids,
        "prompt_tail": split.tail,
        "completion": pack_ids(record.completion_ids),
        "logprobs": pack_floats(record.logprobs),
        "sampled_logprobs": None if sampled is None else pack_floats(sampled),
        "token_flags": pack_flags(record.token_flags),
        "version_spans": [[s.start, s.end, s.weights_version] for s in record.version_spans],
        "min_version": facts.min_version,
        "max_version": facts.max_version,
        "sampling": sampling_to_dict(record.sampling),
        "stop": record.stop.value,
        "stop_detail": record.stop_detail,
        "finish_reason": record.finish_reason,
        "was_delivered": record.was_delivered,
        "cached_tokens": record.cached_tokens,
        "tokenizer_digest": record.tokenizer_digest,
        "template_digest": record.template_digest,
        "numerics_digest": record.numerics_digest,
        "ttft_ms": record.ttft_ms,
        "total_ms": record.total_ms,
    }
