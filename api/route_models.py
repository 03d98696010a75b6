"""GET /v1/models, /v1/models/{id}, /health and /metrics."""

from __future__ import annotations

import asyncio
import json
from typing import Protocol, runtime_checkable

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from m1serve.api.serving import JOURNAL_DEAD, Serving
from m1serve.engine.base import Engine
from m1serve.errors import EngineError
from m1serve.metrics import CONTENT_TYPE
from m1serve.types import EngineStats

HEALTH_WAIT_S = 2.0


@runtime_checkable
class Distant(Protocol):
    """An engine in another process, whose stats are those of the last time it was asked."""

    async def refresh(self) -> None: ...


def models_router(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        serving.keys.caller(request.headers.get("authorization"))
        return JSONResponse(
            {"object": "list", "data": [_card(serving, name) for name in serving.names]}
        )

    # names may hold slashes
    @router.get("/v1/models/{name:path}")
    async def get_model(request: Request, name: str) -> Response:
        serving.keys.caller(request.headers.get("authorization"))
        return JSONResponse(_card(serving, name))

    @router.get("/health")
    async def health() -> Response:
        try:
            async with asyncio.timeout(HEALTH_WAIT_S):
                stats = await _fresh_stats(serving.engine)
        except (EngineError, TimeoutError) as error:
            reason = str(error) or f"the engine did not answer within {HEALTH_WAIT_S:.0f} s"
            return JSONResponse({"status": "dead", "reason": reason}, status_code=503)
        if not serving.journal.is_alive:
            return JSONResponse({"status": "dead", "reason": JOURNAL_DEAD}, status_code=503)
        body = {
            "status": "ok",
            "model": serving.settings.model.model_id,
            "weights_version": serving.engine.weights_version,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
        }
        return Response(json.dumps(body), media_type="application/json")

    @router.get("/metrics")
    async def metrics() -> Response:
        try:
            _show(serving, serving.engine.stats())
        except EngineError:
            serving.metrics.slots.set(0)
        return Response(serving.metrics.exposition(), media_type=CONTENT_TYPE)

    return router


def _card(serving: Serving, name: str) -> dict[str, object]:
    defaults, root = serving.defaults_of(name), serving.settings.model.model_id
    return {
        "id": name,
        "object": "model",
        "created": int(serving.started_at),
        "owned_by": "m1serve",
        "root": root,
        "parent": None if name == root else root,
        "defaults": {
            "history": defaults.history,
            "temperature": defaults.temperature,
            "top_p": defaults.top_p,
            "max_tokens": defaults.max_tokens,
            "max_tokens_applies_to": "answer" if defaults.bounds_answer_only else "all",
            "reasoning_budget": defaults.reasoning_budget,
            "repetition_stop_tokens": defaults.repetition_stop_tokens,
            "repetition_stop_probability": defaults.repetition_stop_probability,
        },
        "max_model_len": serving.engine.capabilities.max_model_len,
        "weights_version": serving.engine.weights_version,
    }


async def _fresh_stats(engine: Engine) -> EngineStats:
    if isinstance(engine, Distant):
        await engine.refresh()
    return engine.stats()


def _show(serving: Serving, stats: EngineStats) -> None:
    metrics = serving.metrics
    metrics.running.set(stats.num_running)
    metrics.waiting.set(stats.num_waiting)
    metrics.slots.set(stats.num_slots)
    metrics.engine_swaps.set(stats.num_swaps)
    metrics.preemptions.set(stats.num_preemptions)
    metrics.prefix_lookups.labels("hit").set(stats.prefix_hits)
    metrics.prefix_lookups.labels("miss").set(stats.prefix_lookups - stats.prefix_hits)
    metrics.snapshots.set(stats.num_snapshots)
    metrics.snapshot_bytes.set(stats.snapshot_bytes)
    metrics.key_pages.labels("free").set(stats.num_free_pages)
    metrics.key_pages.labels("held").set(stats.num_pages - stats.num_free_pages)
    metrics.engine_tokens.labels("sampled").set(stats.sampled_tokens)
    metrics.engine_tokens.labels("prefilled").set(stats.prefilled_tokens)
    metrics.engine_tokens.labels("cached").set(stats.cached_tokens)
    metrics.capture_dropped.set(serving.journal.dropped)
    metrics.capture_queued.set(serving.journal.num_queued)
