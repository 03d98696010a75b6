"""What clients say about turns, completions and sessions, as the journal keeps it. Pure."""

from __future__ import annotations

import hashlib
import json

from pydantic import BaseModel, ConfigDict, Field

from m1serve.api.identity import Caller
from m1serve.errors import RequestError
from m1serve.store.records import FeedbackGiven

_COMPLETION = ("chatcmpl-", "cmpl-")
_Id = Field(default=None, min_length=1, max_length=128)


class FeedbackRequest(BaseModel):
    """About one turn, one completion (all its choices) or one session."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    value: float
    metric: str = Field(default="reward", min_length=1, max_length=128)
    """`reward` is what an episode without a task is trained by; the others are only kept."""
    session_id: str | None = _Id
    turn_id: str | None = _Id
    completion_id: str | None = _Id
    """The `id` of the answer."""
    source: str = Field(default="client", min_length=1, max_length=128)
    comment: str = Field(default="", max_length=8192)
    idempotency_key: str | None = Field(default=None, min_length=1, max_length=256)
    """Feedback with the same one counts once; without one, the same words do."""


def feedback_record(
    given: FeedbackRequest, caller: Caller, *, idempotency_key: str | None, at: float
) -> FeedbackGiven:
    """`idempotency_key` is the header's. Raises RequestError for what it cannot be about."""
    targets = (given.session_id, given.turn_id, given.completion_id)
    if all(target is None for target in targets):
        raise RequestError("feedback needs a session_id, a turn_id or a completion_id, got none")
    if given.completion_id is not None and given.turn_id is not None:
        raise RequestError("feedback is about a turn_id or a completion_id, got both")
    key = given.idempotency_key or idempotency_key
    words = [*targets, given.metric, given.value, given.source, given.comment]
    said = ["key", key] if key is not None else ["words", *words]
    name = json.dumps([caller.tenant_id, *said]).encode()
    return FeedbackGiven(
        feedback_id=hashlib.sha256(name).hexdigest()[:32],
        tenant_id=caller.tenant_id,
        key_id=caller.key_id,
        at=at,
        session_id=given.session_id,
        turn_id=given.turn_id,
        request_id=_request_id(given.completion_id),
        metric=given.metric,
        value=given.value,
        source=given.source,
        comment=given.comment,
    )


def _request_id(completion_id: str | None) -> str | None:
    if completion_id is None:
        return None
    for prefix in _COMPLETION:
        if completion_id.startswith(prefix):
            return completion_id.removeprefix(prefix)
    raise RequestError(
        f"completion_id is {completion_id[:40]!r}; wanted the id of an answer, "
        f"beginning with {' or '.join(_COMPLETION)}",
        param="completion_id",
    )
