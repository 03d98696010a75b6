"""The operator's routes, on a port of their own. Each calls the store and shows what it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.encoders import jsonable_encoder
from starlette.responses import Response

from m1serve import __version__
from m1serve.api.errors import add_error_handlers
from m1serve.api.keys import KeyRing, Scope
from m1serve.api.request_log import RequestLog
from m1serve.api.schema import PromoteRequest, RetrainRequest, RollbackRequest
from m1serve.config import Settings
from m1serve.errors import RequestError, StoreError
from m1serve.metrics import CONTENT_TYPE, Metrics
from m1serve.store import Store

Limit = Annotated[int, Query(ge=1, le=1000)]


def create_admin_app(
    store: Store, settings: Settings, *, metrics: Metrics | None = None
) -> FastAPI:
    """The store stays the caller's. Routes are synchronous: they run in threads."""
    keys = KeyRing.of_admins(settings.serve)

    def require_admin(request: Request) -> None:
        keys.caller(request.headers.get("authorization"), Scope.ADMIN)

    app = FastAPI(title="m1serve admin", version=__version__)
    require = [Depends(require_admin)]
    model_id = settings.model.model_id
    app.include_router(_reading(store, model_id), prefix="/admin", dependencies=require)
    app.include_router(_acting(store, model_id), prefix="/admin", dependencies=require)
    metrics = metrics or Metrics()
    app.include_router(_metrics(store, model_id, metrics), dependencies=require)
    add_error_handlers(app)
    app.add_middleware(RequestLog, metrics=metrics)
    return app


def _reading(store: Store, model_id: str) -> APIRouter:
    router = APIRouter()

    @router.get("/status")
    def status() -> dict[str, Any]:
        target = store.weights.target(model_id)
        return {
            "model_id": model_id,
            "target": target.weights_version if target else None,
            "deployments": jsonable_encoder(store.weights.deployments(model_id)),
            "trajectories": store.ledger.count_trajectories(),
            "jobs": store.jobs.counts(),
            "last_run": jsonable_encoder(next(iter(store.runs.list(limit=1)), None)),
        }

    @router.get("/runs")
    def runs(limit: Limit = 100) -> dict[str, Any]:
        return _listed(store.runs.list(limit=limit))

    @router.get("/runs/{run_id}")
    def run(run_id: str) -> dict[str, Any]:
        found = store.runs.get(run_id)
        if found is None:
            raise RequestError(f"no run {run_id!r}", code="run_not_found", status=404)
        return _shown(found)

    @router.get("/weights")
    def weights() -> dict[str, Any]:
        return _listed(store.weights.list(model_id))

    @router.get("/trajectories")
    def trajectories(state: str | None = None, limit: Limit = 100) -> dict[str, Any]:
        return _listed(store.ledger.list_trajectories(state=state, limit=limit))

    return router


def _acting(store: Store, model_id: str) -> APIRouter:
    router = APIRouter()

    @router.post("/retrain")
    def retrain(body: RetrainRequest) -> dict[str, Any]:
        run_id = store.runs.request(body.model_id or model_id, body.trigger, body.overrides)
        return {"run_id": run_id}

    @router.post("/weights/promote")
    def promote(body: PromoteRequest) -> dict[str, Any]:
        try:
            store.weights.promote(body.weights_version)
        except StoreError as error:
            raise _conflict(error) from None
        return {"weights_version": body.weights_version}

    @router.post("/weights/rollback")
    def rollback(body: RollbackRequest) -> dict[str, Any]:
        try:
            return {"weights_version": store.weights.rollback(body.model_id or model_id)}
        except StoreError as error:
            raise _conflict(error) from None

    return router


def _metrics(store: Store, model_id: str, metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics")
    def page() -> Response:
        metrics.ledger_turns.set(store.ledger.count_turns())
        metrics.show(metrics.trajectories, store.ledger.count_trajectories())
        metrics.show(metrics.jobs, store.jobs.counts())
        metrics.show(metrics.runs, Counter(run.state for run in store.runs.list(limit=1000)))
        for deployment in store.weights.deployments(model_id):
            phases = deployment.report.get("phases_ms")
            for phase, ms in (phases if isinstance(phases, dict) else {}).items():
                metrics.swap_seconds.labels(deployment.replica, phase).set(ms / 1000)
        return Response(metrics.exposition(), media_type=CONTENT_TYPE)

    return router


def _conflict(error: StoreError) -> RequestError:
    return RequestError(str(error), code="conflict", status=409)


def _listed(values: Sequence[object]) -> dict[str, Any]:
    return {"object": "list", "data": jsonable_encoder(values)}


def _shown(value: object) -> dict[str, Any]:
    encoded: dict[str, Any] = jsonable_encoder(value)
    return encoded
