"""/v1/feedback and /v1/sessions: what clients say about their turns, and what became of them."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from m1serve.api.body import read_body
from m1serve.api.feedback import FeedbackRequest, feedback_record
from m1serve.api.identity import check_label
from m1serve.api.keys import Scope
from m1serve.api.route_chat import json_body
from m1serve.api.schema import parse_body
from m1serve.api.serving import Serving
from m1serve.errors import RequestError
from m1serve.store.records import SessionEnded


def feedback_router(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/feedback", openapi_extra=json_body(FeedbackRequest.model_json_schema()))
    async def give_feedback(request: Request) -> Response:
        caller = serving.keys.caller(request.headers.get("authorization"), Scope.FEEDBACK)
        serving.require_capture()
        record = feedback_record(
            parse_body(FeedbackRequest, await read_body(request)),
            caller,
            idempotency_key=request.headers.get("idempotency-key"),
            at=time.time(),
        )
        await serving.journalled(record)
        return JSONResponse({"id": record.feedback_id, "object": "feedback"})

    # ids may hold slashes
    @router.post("/v1/sessions/{session_id:path}/end")
    async def end_session(request: Request, session_id: str) -> Response:
        caller = serving.keys.caller(request.headers.get("authorization"), Scope.FEEDBACK)
        serving.require_capture()
        check_label(session_id, "session id")
        serving.sessions.end(caller.tenant_id, session_id)
        end = SessionEnded(
            session_id=session_id, tenant_id=caller.tenant_id, at=time.time(), reason="end"
        )
        await serving.journalled(end)
        return JSONResponse({"id": session_id, "object": "session", "status": "ended"})

    @router.get("/v1/sessions/{session_id:path}")
    async def get_session(request: Request, session_id: str) -> Response:
        """As the ledger has it: what was answered a moment ago may not be in it yet."""
        caller = serving.keys.caller(request.headers.get("authorization"), Scope.READ)
        check_label(session_id, "session id")
        report = await serving.ledger.session(caller.tenant_id, session_id)
        if report is None:
            raise RequestError(
                f"no session {session_id!r} in the ledger; it is there soon after its first turn",
                code="session_not_found",
                status=404,
            )
        return Response(report, media_type="application/json")

    return router
