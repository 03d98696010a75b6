"""Builds the public application. Everything it needs is passed in; nothing is global."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from m1serve import __version__
from m1serve.api.defaults import answer_defaults
from m1serve.api.errors import add_error_handlers
from m1serve.api.keys import KeyRing
from m1serve.api.ledger_reader import LedgerReader
from m1serve.api.openapi import openapi_page
from m1serve.api.request_log import RequestLog
from m1serve.api.route_chat import chat_router
from m1serve.api.route_completions import completions_router
from m1serve.api.route_feedback import feedback_router
from m1serve.api.route_models import models_router
from m1serve.api.serving import Journal, Serving
from m1serve.api.session_index import SessionIndex
from m1serve.api.session_path import SessionPath
from m1serve.chat.history import HistoryIndex
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import Settings
from m1serve.engine.base import Engine
from m1serve.metrics import Metrics
from m1serve.store import Store

SHOWN_TO_BROWSERS = (
    *("x-request-id", "retry-after", "x-should-retry"),
    *("x-m1-session-id", "x-m1-turn-id", "x-m1-weights-version"),
)


def create_app(
    engine: Engine,
    journal: Journal,
    settings: Settings,
    tokenizer: ChatTokenizer,
    *,
    metrics: Metrics | None = None,
    is_behind_proxy: bool = False,
    open_store: Callable[[], Store] | None = None,
) -> FastAPI:
    """The engine and the journal stay the caller's: it closes them.

    `is_behind_proxy`: requests come with an x-request-id that the proxy itself sends back.
    `open_store`: called at the first question about the ledger, and closed with the application.
    """
    numerics = f"{settings.engine.kind}:{settings.train.serving_dtype}"
    serving = Serving(
        engine=engine,
        journal=journal,
        settings=settings,
        tokenizer=tokenizer,
        history=HistoryIndex(tokenizer),
        sessions=SessionIndex(idle_s=settings.serve.session_idle_s),
        keys=KeyRing.of_users(settings.serve),
        ledger=LedgerReader(open_store),
        metrics=metrics or Metrics(),
        defaults=answer_defaults(settings.model),
        numerics_digest=hashlib.sha256(numerics.encode()).hexdigest(),
    )
    app = FastAPI(title="m1serve", version=__version__, lifespan=_closing(serving.ledger))
    app.include_router(chat_router(serving))
    app.include_router(completions_router(serving))
    app.include_router(feedback_router(serving))
    app.include_router(models_router(serving))
    add_error_handlers(app)
    app.openapi = openapi_page(app)  # type: ignore[method-assign]
    app.add_middleware(SessionPath)
    app.add_middleware(RequestLog, metrics=serving.metrics, is_behind_proxy=is_behind_proxy)
    if origins := settings.serve.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=list(SHOWN_TO_BROWSERS),
        )
    return app


def _closing(ledger: LedgerReader) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def until_the_end(_: FastAPI) -> AsyncIterator[None]:
        yield
        ledger.close()

    return until_the_end
