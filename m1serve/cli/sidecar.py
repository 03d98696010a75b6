"""`m1serve sidecar`: moves the journal into the database, until SIGTERM."""

from __future__ import annotations

import signal
import threading

from m1serve.cli import options


def sidecar(
    config: options.ConfigFile = None,
    home: options.Home = None,
    overrides: options.Overrides = None,
) -> None:
    """Ingests what the server captured."""
    from m1serve.store.sidecar import Sidecar

    options.log_to_stderr()
    settings = options.read_settings(config=config, home=home, overrides=overrides)
    stop = stop_on_signal()
    with options.open_store(settings, must_exist=False) as store:
        Sidecar(store, settings.journal_dir).run(stop)


def stop_on_signal() -> threading.Event:
    """Set by SIGTERM and SIGINT. Main thread only."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop
