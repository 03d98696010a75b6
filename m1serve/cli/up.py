"""`m1serve up`: everything on this machine, supervised, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from m1serve.cli import options, readiness
from m1serve.cli.home_lock import end_leftovers, lock_home
from m1serve.cli.lifeline import own_command, tied_environment
from m1serve.cli.ports import require_free
from m1serve.cli.supervisor import Supervisor
from m1serve.errors import ConfigError

if TYPE_CHECKING:
    from m1serve.config import Settings

READY_TIMEOUT_S = 180.0


def up(
    config: options.ConfigFile = None,
    home: options.Home = None,
    overrides: options.Overrides = None,
    model: options.Model = None,
    port: options.Port = None,
    admin_port: options.AdminPort = None,
    no_ray: options.NoRay = False,
    ready_file: Annotated[
        Path | None,
        typer.Option(
            "--ready-file", help="Written (JSON with url, admin_url, pid) once it serves."
        ),
    ] = None,
) -> None:
    """Starts server, sidecar, worker with beat and trainer on this machine."""
    settings = options.read_settings(
        config=config,
        home=home,
        overrides=overrides,
        model=model,
        port=port,
        admin_port=admin_port,
        no_ray=no_ray,
    )
    if ready_file is not None:
        ready_file = ready_file.absolute()
        ready_file.unlink(missing_ok=True)
    console = Console(stderr=True)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    with lock_home(settings.home):
        for name in end_leftovers(settings.home, grace_s=20.0):
            console.print(f"ended the {name} of an earlier `up` that was killed")
        ports = {"serve.port": settings.serve.port, "serve.admin_port": settings.serve.admin_port}
        require_free(settings.serve.host, ports)
        if not console.is_terminal:
            console.print("m1serve is starting")
        with console.status("preparing the store and the first weights"):
            settings = prepare_home(settings)
        try:
            asyncio.run(_supervise(settings, console, ready_file))
        finally:
            if ready_file is not None:
                ready_file.unlink(missing_ok=True)


def prepare_home(settings: Settings) -> Settings:
    """Store migrated, first version registered: in a process of its own, which may import torch.

    Returns settings that name the imported model directory, so that every role reads the same one.
    """
    environment = tied_environment(options.settings_environment(settings), num_threads=1)
    done = subprocess.run(
        own_command("weights", "init"), env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(last.removeprefix("m1serve: "))
    model_dir = Path(json.loads(done.stdout)["model_dir"])
    model = settings.model.model_copy(update={"path": model_dir})
    return settings.model_copy(update={"model": model})


async def _supervise(settings: Settings, console: Console, ready_file: Path | None) -> None:
    from m1serve.cli.children import children

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    supervisor = Supervisor(
        children(settings), run_dir=settings.home / "run", log_dir=settings.log_dir
    )
    supervising = asyncio.create_task(supervisor.run(stop))
    try:
        with console.status("starting"):
            waited_s = await asyncio.to_thread(
                readiness.wait_until_ready,
                settings.serve.host,
                settings.serve.port,
                timeout_s=READY_TIMEOUT_S,
                is_hopeless=lambda: stop.is_set() or supervising.done(),
            )
    except readiness.NotReadyError:
        was_asked = stop.is_set()
        stop.set()
        await supervising
        if not was_asked:
            raise
        return
    supervisor.is_ready = True
    _announce(settings, console, waited_s, ready_file)
    await supervising
    console.print("m1serve stopped")


def _announce(
    settings: Settings, console: Console, waited_s: float, ready_file: Path | None
) -> None:
    serve = settings.serve
    url, admin_url = (
        f"http://{serve.host}:{serve.port}/v1",
        f"http://{serve.host}:{serve.admin_port}",
    )
    console.print(
        f"m1serve serves [bold]{settings.model.model_id}[/bold] at {url} ({waited_s:.0f} s)\n"
        f"  admin {admin_url}   logs {settings.log_dir}\n"
        f"  try   m1serve chat --base-url {url} --task refund/report/1\n"
        f"  stop  Ctrl-C or kill {os.getpid()}",
        highlight=False,
        soft_wrap=True,
    )
    if ready_file is not None:
        facts: dict[str, object] = {"url": url, "admin_url": admin_url, "pid": os.getpid()}
        readiness.write_ready_file(ready_file, facts | {"home": str(settings.home)})
