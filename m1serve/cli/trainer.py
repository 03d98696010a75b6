"""`m1serve trainer`: works on requested runs, one after the other, until SIGTERM."""

from __future__ import annotations

from m1serve.cli import options


def trainer(
    config: options.ConfigFile = None,
    home: options.Home = None,
    overrides: options.Overrides = None,
    model: options.Model = None,
) -> None:
    """Trains, verifies, gates and promotes."""
    from m1serve.cli.sidecar import stop_on_signal
    from m1serve.online_rl.trainer import run_trainer

    options.log_to_stderr()
    settings = options.read_settings(config=config, home=home, overrides=overrides, model=model)
    run_trainer(settings, stop_on_signal())
