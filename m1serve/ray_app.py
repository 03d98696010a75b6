"""The product on Ray Serve: the API as ingress, the engine in replicas of its own.

`serve_with_ray` starts Ray on this machine and blocks; the admin routes run in the calling process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import ray
import uvicorn
from fastapi import FastAPI
from ray import serve
from ray.exceptions import TaskCancelledError
from ray.serve import Application
from ray.serve.exceptions import RequestCancelledError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from m1serve.api import create_admin_app, create_app
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import Settings
from m1serve.engine.launch import served_tokenizer
from m1serve.engine.remote import RemoteEngine
from m1serve.engine.replica import engine_app
from m1serve.errors import ConfigError, EngineError
from m1serve.store import Store
from m1serve.store.journal import JournalWriter

logger = logging.getLogger(__name__)

APP_NAME = "m1serve"
MAX_OPEN_RESPONSES = 4096
"""Every open stream counts."""
STREAM_GRACE_S = 7200.0
"""Serve cuts what a stopping replica still sends after this long."""
SHUTDOWN_WAIT_S = 8.0
OBJECT_STORE_BYTES = 256 * 2**20


class Ingress:
    """The ASGI app in a Serve replica, over a handle to the engine's."""

    # Ray Serve awaits the constructor
    async def __init__(self, settings: Settings, engine: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        self._settings = settings
        self._closing = AsyncExitStack()
        self._engine = await RemoteEngine.connect(engine)
        self._closing.push_async_callback(self._engine.close)
        self._tokenizer = await asyncio.to_thread(
            _served_tokenizer, settings, self._engine.weights_version
        )
        self._journal = JournalWriter(
            settings.journal_dir, max_bytes=settings.serve.journal_max_bytes
        )
        self._closing.push_async_callback(asyncio.to_thread, self._journal.close)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        # Serve's proxy names requests and sends the name back by itself
        app = create_app(
            self._engine,
            self._journal,
            self._settings,
            self._tokenizer,
            is_behind_proxy=True,
            open_store=partial(Store.open, self._settings.database, migrate=False),
        )
        return _WithDisconnects(app)

    async def __del__(self) -> None:
        await self._closing.aclose()


class _WithDisconnects:
    """Serve tells of a client that left by an error; ASGI has a message for it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_or_disconnect() -> Message:
            try:
                return await receive()
            except (TaskCancelledError, RequestCancelledError):
                return {"type": "http.disconnect"}

        await self._app(scope, receive_or_disconnect, send)


def ingress_app(settings: Settings) -> Application:
    """Everything Serve has to run."""
    deployment = serve.deployment(
        name="ingress",
        num_replicas=1,
        max_ongoing_requests=MAX_OPEN_RESPONSES,
        graceful_shutdown_timeout_s=STREAM_GRACE_S,
        graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress()(Ingress))
    app: Application = deployment.bind(settings, engine_app(settings))
    return app


def serve_with_ray(settings: Settings) -> None:
    """Blocks until SIGTERM or SIGINT. Raises ConfigError for a port that is taken."""
    bound = settings.serve
    _require_free(bound.host, bound.port, "serve.port")
    with listen(bound.host, bound.admin_port, "serve.admin_port") as listener:
        store = Store.open(settings.database)
        try:
            _start_ray()
            _start_serve(settings)
            _run_admin(create_admin_app(store, settings), listener)
        finally:
            _stop()
            store.close()


def listen(host: str, port: int, setting: str) -> socket.socket:
    """A listening socket that shares its port with nobody."""
    try:
        return socket.create_server((host, port), backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"{setting}: cannot listen on {host}:{port} ({error.strerror}); stop what does or "
            f"choose another port with --set {setting}=PORT"
        ) from None


def _require_free(host: str, port: int, setting: str) -> None:
    """Serve's proxies set SO_REUSEPORT: two on one port would share its clients silently."""
    listen(host, port, setting).close()


def _start_ray() -> None:
    # read by Ray's processes, which inherit them
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    # Ray's default of 15 lets a training run on the same cores starve what serves
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local",
        _node_ip_address="127.0.0.1",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        logging_level=logging.WARNING,
    )


def _start_serve(settings: Settings) -> None:
    """Returns when the engine has its weights and the port answers."""
    quiet = LoggingConfig(
        log_level="WARNING",
        enable_access_log=False,
        logs_dir=str(settings.log_dir.resolve() / "ray-serve"),
    )
    bound = settings.serve
    serve.start(http_options={"host": bound.host, "port": bound.port}, logging_config=quiet)
    try:
        serve.run(ingress_app(settings), name=APP_NAME, route_prefix="/", logging_config=quiet)
    except RuntimeError as error:
        raise EngineError(
            f"{error} `m1serve doctor` checks the weights; what the replicas said is in "
            f"{quiet.logs_dir}"
        ) from None


def _run_admin(app: FastAPI, listener: socket.socket) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises what ended it once more, and then Ray is still to be stopped
        signal.signal(number, lambda *_: None)
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[listener])


def _stop() -> None:
    """Answers that are still open get a few seconds; what is cut then was not whole, nor kept."""
    stopping = threading.Thread(target=serve.shutdown, name="serve-shutdown", daemon=True)
    stopping.start()
    stopping.join(SHUTDOWN_WAIT_S)
    if stopping.is_alive():
        logger.warning("Ray Serve did not stop within %.0f s; ending it", SHUTDOWN_WAIT_S)
    ray.shutdown()


def _served_tokenizer(settings: Settings, weights_version: str) -> ChatTokenizer:
    store = Store.open(settings.database, migrate=False)
    try:
        return served_tokenizer(store, weights_version)
    finally:
        store.close()
