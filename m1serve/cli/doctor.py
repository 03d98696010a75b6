"""`m1serve doctor`: what would keep the product from working here, and what to do about it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import typer

from m1serve.cli import options, readiness
from m1serve.cli.console import wide_console
from m1serve.cli.finding import Finding, Unfit
from m1serve.cli.ports import is_free
from m1serve.errors import M1ServeError

if TYPE_CHECKING:
    from m1serve.config import Settings

MIN_FREE_BYTES = 2 * 2**30
REDIS_PORT = 6379
BROKER_TIMEOUT_S = 3.0
PACKAGES = ("torch", "ray", "celery", "sqlalchemy", "fastapi", "openai", "tokenizers")


def doctor(
    config: options.ConfigFile = None,
    home: options.Home = None,
    overrides: options.Overrides = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """Checks the machine, the model, the home, the ports. Exit code 1: one is wrong.

    --model alone: that directory (files, tensors, tokenizer, template) and what fits in memory,
    without loading it. With --home or --config beside it: all.
    """
    settings = options.read_settings(config=config, home=home, overrides=overrides, model=model)
    is_model_only = model is not None and home is None and config is None
    console = wide_console()
    findings: list[Finding] = []
    for finding in examine(settings, with_product=not is_model_only):
        findings.append(finding)
        if not as_json:
            console.print(finding.line, highlight=False)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    raise typer.Exit(0 if all(finding.is_good for finding in findings) else 1)


def examine(settings: Settings, *, with_product: bool) -> Iterator[Finding]:
    """One finding a subject; a failed check never hides the next."""
    from m1serve.cli.doctor_model import examine_model
    from m1serve.model.devices import found_devices

    yield from _examined({"python": _python, "packages": _packages}, settings)
    yield from examine_model(settings.model_dir, found_devices())
    if with_product:
        product = {
            "home": _home,
            "database": _database,
            "weights": _weights,
            "broker": _broker,
            "server": _server,
        }
        yield from _examined(product, settings)


def _examined(
    checks: Mapping[str, Callable[[Settings], str]], settings: Settings
) -> Iterator[Finding]:
    for subject, check in checks.items():
        try:
            yield Finding(subject=subject, is_good=True, text=check(settings))
        except (M1ServeError, OSError, PackageNotFoundError) as error:
            yield Finding(subject=subject, is_good=False, text=str(error))


def _python(_: Settings) -> str:
    return f"{sys.version.split()[0]}, {os.cpu_count()} cores"


def _packages(_: Settings) -> str:
    return ", ".join(f"{name} {version(name)}" for name in PACKAGES)


def _home(settings: Settings) -> str:
    existing = settings.home
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise Unfit(f"{existing} cannot be written; choose another --home")
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < MIN_FREE_BYTES:
        raise Unfit(f"{free_bytes / 2**30:.1f} GiB free at {existing}, 2 wanted; free some")
    return f"{settings.home}, {free_bytes / 2**30:.0f} GiB free"


def _database(settings: Settings) -> str:
    if not settings.home.exists() and settings.database_url is None:
        return "none yet; the first `m1serve up` makes it"
    with options.open_store(settings) as store:
        num = len(store.weights.list(settings.model.model_id))
    return f"{num} weight version{'' if num == 1 else 's'} on record"


def _weights(settings: Settings) -> str:
    from pathlib import Path

    from m1serve.model.weights import verify_version

    if not settings.home.exists() and settings.database_url is None:
        return "none yet; the first `m1serve up` imports the model"
    with options.open_store(settings) as store:
        target = store.weights.target(settings.model.model_id)
    if target is None:
        raise Unfit("no version should serve; run `m1serve up` or `m1serve weights init`")
    manifest = verify_version(Path(target.path), weights_version=target.weights_version)
    return f"{target.weights_version} should serve; its {len(manifest.tensors)} tensors are intact"


def _broker(settings: Settings) -> str:
    url = settings.score.broker_url
    if url is None:
        return "embedded, files in the home"
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or REDIS_PORT
    try:
        socket.create_connection((host, port), timeout=BROKER_TIMEOUT_S).close()
    except OSError as error:
        raise Unfit(
            f"no broker at {host}:{port} ({error}); start it or mend score.broker_url"
        ) from None
    return f"{parts.scheme} at {host}:{port} takes connections"


def _server(settings: Settings) -> str:
    serve = settings.serve
    if readiness.answers(serve.host, serve.port):
        return f"answers at http://{serve.host}:{serve.port}"
    taken = [p for p in (serve.port, serve.admin_port) if not is_free(serve.host, p)]
    if taken:
        raise Unfit(
            f"port {taken[0]} is taken by something that is no m1serve; use --set serve.port"
        )
    return f"not running; ports {serve.port} and {serve.admin_port} are free"
