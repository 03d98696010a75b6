"""`m1serve serve`: the OpenAI API and the admin routes, over Ray Serve or in one process."""

from __future__ import annotations

import asyncio
import signal
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

from m1serve.cli import options
from m1serve.errors import ConfigError

if TYPE_CHECKING:
    from m1serve.config import Settings


def serve(
    config: options.ConfigFile = None,
    home: options.Home = None,
    overrides: options.Overrides = None,
    model: options.Model = None,
    port: options.Port = None,
    admin_port: options.AdminPort = None,
    no_ray: options.NoRay = False,
) -> None:
    """Serves until SIGTERM. The store must have a version to serve (`m1serve weights init`)."""
    options.log_to_stderr()
    settings = options.read_settings(
        config=config,
        home=home,
        overrides=overrides,
        model=model,
        port=port,
        admin_port=admin_port,
        no_ray=no_ray,
    )
    if settings.serve.with_ray:
        from m1serve.ray_app import serve_with_ray

        serve_with_ray(settings)
    else:
        asyncio.run(serve_in_process(settings))


async def serve_in_process(settings: Settings) -> None:
    """Engine, API, admin routes and version watcher on one event loop."""
    from m1serve.api.admin import create_admin_app
    from m1serve.api.app import create_app
    from m1serve.engine.launch import served_tokenizer, start_best_engine, tune_process
    from m1serve.engine.watcher import VersionWatcher
    from m1serve.metrics import Metrics
    from m1serve.store import Store
    from m1serve.store.journal import JournalWriter

    tune_process(settings)
    bound = settings.serve
    sockets = [listen(bound.host, port) for port in (bound.port, bound.admin_port)]
    with options.open_store(settings) as store:
        engine = start_best_engine(store, settings)
        journal = JournalWriter(settings.journal_dir, max_bytes=bound.journal_max_bytes)
        metrics = Metrics()
        tokenizer = served_tokenizer(store, engine.weights_version)
        watcher = VersionWatcher(
            engine,
            store,
            model_id=settings.model.model_id,
            replica=f"{socket.gethostname()}:{bound.port}",
            poll_s=bound.poll_s,
        )
        apps = (
            create_app(
                engine,
                journal,
                settings,
                tokenizer,
                metrics=metrics,
                open_store=partial(Store.open, settings.database, migrate=False),
            ),
            create_admin_app(store, settings, metrics=metrics),
        )
        watching = asyncio.create_task(watcher.run())
        try:
            await run_apps(dict(zip(sockets, apps, strict=True)), watching)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await engine.close()
            await asyncio.to_thread(journal.close)


async def run_apps(apps: dict[socket.socket, Any], watching: asyncio.Task[None]) -> None:
    """Until SIGTERM or SIGINT, or until the watcher dies, whose error is then raised."""
    import uvicorn

    servers = []
    running = []
    for listener, app in apps.items():
        server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5)
        )
        servers.append(server)
        running.append(asyncio.create_task(server.serve(sockets=[listener])))
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for server in servers:
            server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    watching.add_done_callback(lambda _: stop())
    await asyncio.gather(*running)
    if watching.done():
        watching.result()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the port is taken."""
    try:
        return socket.create_server((host, port), backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}; choose another with --set serve.port=PORT"
        ) from None
