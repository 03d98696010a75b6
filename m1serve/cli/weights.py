"""`m1serve weights`: which versions there are, what should serve and what does."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from m1serve.cli import options
from m1serve.cli.console import wide_console
from m1serve.cli.prune import prune
from m1serve.errors import ConfigError

if TYPE_CHECKING:
    from m1serve.config import Settings
    from m1serve.store import Store

app = typer.Typer(help="Weight versions: list, promote, roll back, prune.", no_args_is_help=True)
app.command("prune")(prune)
Version = Annotated[str, typer.Argument(metavar="VERSION", help="<model_id>@<n>")]


@app.command("list")
def list_versions(
    config: options.ConfigFile = None,
    home: options.Home = None,
    overrides: options.Overrides = None,
    as_json: options.AsJson = False,
) -> None:
    """Every version with its state; what should serve, and what each replica says it serves."""
    settings = options.read_settings(config=config, home=home, overrides=overrides)
    with options.open_store(settings) as store:
        versions = store.weights.list(settings.model.model_id)
        target = store.weights.target(settings.model.model_id)
        deployments = store.weights.deployments(settings.model.model_id)
    stable = target.weights_version if target else None
    if as_json:
        facts = {
            "stable": stable,
            "versions": [asdict(version) for version in versions],
            "deployments": [asdict(deployment) for deployment in deployments],
        }
        print(json.dumps(facts))
        return
    table = Table()
    for name in ("version", "state", "parent", "run", "made", "reason"):
        table.add_column(name)
    for version in versions:
        table.add_row(
            version.weights_version,
            f"[bold]{version.state}[/bold]" if version.weights_version == stable else version.state,
            version.parent or "",
            (version.run_id or "")[:8],
            _clock(version.created_at),
            version.reason,
        )
    console = wide_console()
    console.print(table)
    for deployment in deployments:
        refused = "" if deployment.is_accepted else f"; refused {deployment.wanted_version}: "
        console.print(
            f"replica {deployment.replica} ({deployment.slot}) serves "
            f"{deployment.weights_version}, as it said at {_clock(deployment.verified_at)}"
            f"{refused}{deployment.reason}"
        )


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


@app.command("promote")
def promote(
    version: Version,
    config: options.ConfigFile = None,
    home: options.Home = None,
    overrides: options.Overrides = None,
    as_json: options.AsJson = False,
) -> None:
    """Makes a version that passed its gates the one that serves; replicas swap by themselves."""
    settings = options.read_settings(config=config, home=home, overrides=overrides)
    with options.open_store(settings) as store:
        if store.weights.get(version) is None:
            raise ConfigError(f"no version {version}; see `m1serve weights list`")
        store.weights.promote(version, reason="promoted by hand")
    print(json.dumps({"stable": version}) if as_json else f"{version} is active")


@app.command("rollback")
def rollback(
    config: options.ConfigFile = None,
    home: options.Home = None,
    overrides: options.Overrides = None,
    as_json: options.AsJson = False,
) -> None:
    """Back to the nearest retired ancestor of what serves."""
    settings = options.read_settings(config=config, home=home, overrides=overrides)
    with options.open_store(settings) as store:
        version = store.weights.rollback(settings.model.model_id)
    print(json.dumps({"stable": version}) if as_json else f"{version} is active again")


@app.command("init")
def init(
    config: options.ConfigFile = None,
    home: options.Home = None,
    overrides: options.Overrides = None,
    model: options.Model = None,
) -> None:
    """Makes the store and registers the first version; does nothing when there is one."""
    settings = options.read_settings(config=config, home=home, overrides=overrides, model=model)
    with options.open_store(settings, must_exist=False) as store:
        facts = register_first(settings, store)
    print(json.dumps(facts))


def register_first(settings: Settings, store: Store) -> dict[str, str]:
    """Imports the configured model directory as `<model_id>@0`, active and targeted."""
    import torch

    from m1serve.model.manifest import SERVING, read_manifest
    from m1serve.model.weights import import_model_dir, version_path
    from m1serve.types import Slot, VersionState

    torch.set_num_threads(settings.engine.num_threads)
    model_id = settings.model.model_id
    first = f"{model_id}@0"
    target = store.weights.target(model_id)
    path = version_path(settings.weights_dir, first)
    if target is None or settings.model.path is not None:
        path = import_model_dir(
            settings.weights_dir, model_id=model_id, model_dir=settings.model_dir
        )
        store.weights.register(
            first,
            model_id,
            str(path),
            state=VersionState.ACTIVE,
            manifest_digest=read_manifest(path).digest,
        )
    if target is None:
        store.weights.set_target(model_id, Slot.STABLE, first, expect=None, reason="first import")
    serving = target.weights_version if target else first
    return {"weights_version": serving, "model_dir": str(path / SERVING)}
