"""`m1serve worker`: scores trajectories and sends what is due, until SIGTERM."""

from __future__ import annotations

import typer

from m1serve.cli import options


def worker(
    config: options.ConfigFile = None,
    home: options.Home = None,
    overrides: options.Overrides = None,
    model: options.Model = None,
) -> None:
    """Runs the Celery worker with its beat."""
    from m1serve.online_rl.tasks import run_worker

    options.log_to_stderr()
    settings = options.read_settings(config=config, home=home, overrides=overrides, model=model)
    raise typer.Exit(run_worker(settings))
