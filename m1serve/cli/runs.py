"""`m1serve runs`: what was trained, what came of it and why."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from m1serve.cli import options
from m1serve.cli.console import wide_console
from m1serve.errors import ConfigError

app = typer.Typer(help="Training runs: list, show.", no_args_is_help=True)


@app.command("list")
def list_runs(
    config: options.ConfigFile = None,
    home: options.Home = None,
    overrides: options.Overrides = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Newest first.")] = 20,
    as_json: options.AsJson = False,
) -> None:
    """The newest runs: state, the version trained from, the version made, and the reason."""
    settings = options.read_settings(config=config, home=home, overrides=overrides)
    with options.open_store(settings) as store:
        runs = store.runs.list(settings.model.model_id, limit=limit)
    if as_json:
        print(json.dumps([asdict(run) for run in runs]))
        return
    table = Table()
    for name in ("run", "trigger", "state", "phase", "parent", "made", "claimed", "asked", "took"):
        table.add_column(name)
    table.add_column("reason")
    for run in runs:
        took = (run.finished_at or time.time()) - run.started_at if run.started_at else None
        table.add_row(
            run.run_id[:8],
            run.trigger,
            run.state,
            run.phase,
            run.parent_version or "",
            run.weights_version or "",
            str(run.num_claimed),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.requested_at)),
            "" if took is None else f"{took:.0f} s",
            run.reason,
        )
    wide_console().print(table)


@app.command("show")
def show_run(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run id, or a beginning of one.")],
    config: options.ConfigFile = None,
    home: options.Home = None,
    overrides: options.Overrides = None,
) -> None:
    """Everything the run's row knows, as JSON."""
    settings = options.read_settings(config=config, home=home, overrides=overrides)
    with options.open_store(settings) as store:
        found = store.runs.get(run)
        alike = [r for r in store.runs.list(limit=1000) if r.run_id.startswith(run)]
    if found is None and len(alike) != 1:
        what = f"{len(alike)} runs begin with" if alike else "no run begins with"
        raise ConfigError(f"{what} {run!r}; see `m1serve runs list`")
    print(json.dumps(asdict(found or alike[0])))
