"""The options that commands share, and how they become one Settings tree."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from m1serve.errors import ConfigError

if TYPE_CHECKING:
    from m1serve.config import Settings
    from m1serve.store import Store

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]
Home = Annotated[
    Path | None, typer.Option("--home", help="Where everything is kept (default m1serve-data).")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting; may be given again."),
]
Model = Annotated[
    Path | None, typer.Option("--model", help="Model directory (default: the shipped nano).")
]
Port = Annotated[int | None, typer.Option("--port", help="Port of the OpenAI API.")]
AdminPort = Annotated[int | None, typer.Option("--admin-port", help="Port of the admin routes.")]
NoRay = Annotated[bool, typer.Option("--no-ray", help="One uvicorn process, no Ray Serve.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output, for scripts.")]


def parse_override(text: str) -> tuple[list[str], object]:
    """`train.lr=1e-4` becomes (["train", "lr"], 0.0001); a value that is no JSON is a string."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {text!r} is not of the form section.key=value")
    try:
        parsed: object = json.loads(value)
    except json.JSONDecodeError:
        parsed = value
    return key.strip().split("."), parsed


def settings_tree(pairs: list[tuple[list[str], object]]) -> dict[str, object]:
    """Nested dict of dotted keys; a later pair wins."""
    tree: dict[str, object] = {}
    for path, value in pairs:
        node = tree
        for name in path[:-1]:
            inner = node.setdefault(name, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"--set {'.'.join(path)}: {name} was already given a value")
            node = inner
        node[path[-1]] = value
    return tree


def read_settings(
    *,
    config: Path | None = None,
    home: Path | None = None,
    overrides: list[str] | None = None,
    model: Path | None = None,
    port: int | None = None,
    admin_port: int | None = None,
    no_ray: bool = False,
) -> Settings:
    """Defaults < TOML < environment < `--set` < named options; all paths absolute."""
    from m1serve.config import load_settings

    pairs = [parse_override(text) for text in overrides or []]
    named: list[tuple[str, object]] = [
        ("home", home),
        ("model.path", model),
        ("serve.port", port),
        ("serve.admin_port", admin_port),
        ("serve.with_ray", False if no_ray else None),
    ]
    pairs += [(key.split("."), value) for key, value in named if value is not None]
    return with_absolute_paths(load_settings(config, **settings_tree(pairs)))


def with_absolute_paths(settings: Settings) -> Settings:
    """The same settings, valid from any working directory."""
    model = settings.model.model_copy(update={"path": _absolute(settings.model.path)})
    engine = settings.engine.model_copy(update={"script": _absolute(settings.engine.script)})
    url = settings.database_url
    prefix = "sqlite:///"
    if url is not None and url.startswith(prefix) and not url.startswith(prefix + "/"):
        url = prefix + str(Path(url.removeprefix(prefix)).absolute())
    return settings.model_copy(
        update={
            "home": settings.home.absolute(),
            "model": model,
            "engine": engine,
            "database_url": url,
        }
    )


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


def settings_environment(settings: Settings) -> dict[str, str]:
    """The environment in which a child process reads exactly these settings."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("M1SERVE_")}
    for name, value in settings.model_dump(mode="json").items():
        if value is not None:
            is_plain = isinstance(value, str)
            environment[f"M1SERVE_{name.upper()}"] = value if is_plain else json.dumps(value)
    return environment


@contextmanager
def open_store(settings: Settings, *, must_exist: bool = True) -> Iterator[Store]:
    """The store of these settings. Raises ConfigError instead of making one in a mistyped home.

    Only with `must_exist=False` may it ingest: the tenant key is made in the home then.
    """
    from m1serve.store import Store, load_tenant_key

    file = Path(settings.database.removeprefix("sqlite:///"))
    if must_exist and settings.database.startswith("sqlite:///") and not file.exists():
        raise ConfigError(
            f"no database at {file}; give the --home of a server that has run, or make one: "
            "`m1serve up` does, or `m1serve weights init` with the same settings"
        )
    attempts = settings.score.max_attempts
    if must_exist:
        store = Store.open(settings.database, job_max_attempts=attempts)
    else:
        key = load_tenant_key(settings.home)
        store = Store.open(settings.database, tenant_key=key, job_max_attempts=attempts)
    try:
        yield store
    finally:
        store.close()


def log_to_stderr() -> None:
    """For the processes that `up` starts: their standard error is their log."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
