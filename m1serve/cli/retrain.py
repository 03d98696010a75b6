"""`m1serve retrain`: asks the trainer for a run, and may wait for what comes of it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from m1serve.cli import options
from m1serve.errors import ConfigError

if TYPE_CHECKING:
    from m1serve.store import Store
    from m1serve.store.run_views import RunView

ENDED = ("promoted", "rejected", "skipped", "failed")
POLL_S = 0.1


def retrain(
    config: options.ConfigFile = None,
    home: options.Home = None,
    overrides: options.Overrides = None,
    train: Annotated[
        list[str] | None,
        typer.Option("--train", metavar="KEY=VALUE", help="A train setting for this run only."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Until the run has ended.")] = True,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait.")] = 3600.0,
    as_json: options.AsJson = False,
) -> None:
    """Requests a run. Exit code 0 when it was promoted or skipped, 1 when rejected or failed."""
    settings = options.read_settings(config=config, home=home, overrides=overrides)
    wanted = options.settings_tree([options.parse_override(text) for text in train or []])
    unknown = set(wanted) - set(type(settings.train).model_fields)
    if unknown:
        raise ConfigError(f"--train: no such setting: {', '.join(sorted(unknown))}")
    with options.open_store(settings) as store:
        run_id = store.runs.request(settings.model.model_id, "cli", wanted)
        if not wait:
            print(json.dumps({"run_id": run_id}) if as_json else f"requested run {run_id}")
            return
        run = wait_for_run(store, run_id, timeout_s=timeout_s)
    if as_json:
        print(json.dumps(asdict(run), default=str))
    else:
        became = f" as {run.weights_version}" if run.weights_version else ""
        print(f"run {run_id}: {run.state}{became}{': ' + run.reason if run.reason else ''}")
    raise typer.Exit(0 if run.state in ("promoted", "skipped") else 1)


def wait_for_run(store: Store, run_id: str, *, timeout_s: float) -> RunView:
    """Polls until the run has ended, showing its phase. Raises ConfigError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    with Console(stderr=True).status("waiting for the trainer") as status:
        while True:
            run = store.runs.get(run_id)
            if run is None:
                raise ConfigError(f"no run {run_id}")
            if run.state in ENDED:
                return run
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"run {run_id} is still {f'{run.state} {run.phase}'.strip()} after "
                    f"{timeout_s:.0f} s; the trainer, part of `m1serve up`, takes it when it runs"
                )
            status.update(f"run {run_id[:8]}: {run.state} {run.phase}")
            time.sleep(POLL_S)
