"""POST /v1/feedback and /v1/sessions/{id}/end: what clients say about turns and sessions."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from m1serve.api.body import read_body
from m1serve.api.identity import authenticate, check_label
from m1serve.api.route_chat import json_body
from m1serve.api.schema import FeedbackRequest, parse_body
from m1serve.api.serving import Serving
from m1serve.errors import RequestError
from m1serve.store.records import FeedbackGiven, SessionEnded


def feedback_router(serving: Serving) -> APIRouter:
    router = APIRouter()
    accepted = serving.settings.serve.api_keys

    @router.post("/v1/feedback", openapi_extra=json_body(FeedbackRequest.model_json_schema()))
    async def give_feedback(request: Request) -> Response:
        caller = authenticate(request.headers.get("authorization"), accepted)
        serving.require_capture()
        given = parse_body(FeedbackRequest, await read_body(request))
        if given.session_id is None and given.turn_id is None:
            raise RequestError("feedback needs a session_id or a turn_id, got neither")
        record = FeedbackGiven(
            feedback_id=uuid.uuid4().hex,
            tenant_id=caller.tenant_id,
            key_id=caller.key_id,
            at=time.time(),
            session_id=given.session_id,
            turn_id=given.turn_id,
            metric=given.metric,
            value=given.value,
            comment=given.comment,
        )
        serving.journal.append(record)
        await serving.written()
        return JSONResponse({"id": record.feedback_id, "object": "feedback"})

    # ids may hold slashes
    @router.post("/v1/sessions/{session_id:path}/end")
    async def end_session(request: Request, session_id: str) -> Response:
        caller = authenticate(request.headers.get("authorization"), accepted)
        serving.require_capture()
        check_label(session_id, "session id")
        serving.journal.append(
            SessionEnded(
                session_id=session_id, tenant_id=caller.tenant_id, at=time.time(), reason="end"
            )
        )
        await serving.written()
        return JSONResponse({"id": session_id, "object": "session", "status": "ended"})

    return router
