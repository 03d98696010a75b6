"""The processes of a running product: server, worker with beat, trainer, sidecar."""

from __future__ import annotations

from m1serve.cli.lifeline import own_command, tied_environment
from m1serve.cli.options import settings_environment
from m1serve.cli.supervisor import ChildSpec
from m1serve.config import Settings


def children(settings: Settings) -> list[ChildSpec]:
    """The server stops first, so that nothing new comes in; the sidecar last: all is written."""
    return [
        _child("server", settings, "serve", num_threads=settings.engine.num_threads, stop_order=0),
        _child("worker", settings, "worker", num_threads=1, stop_order=1),
        _child(
            "trainer", settings, "trainer", num_threads=settings.train.num_threads, stop_order=1
        ),
        _child("sidecar", settings, "sidecar", num_threads=1, stop_order=2),
    ]


def _child(
    name: str, settings: Settings, *command: str, num_threads: int, stop_order: int
) -> ChildSpec:
    environment = tied_environment(settings_environment(settings), num_threads=num_threads)
    return ChildSpec(
        name=name, argv=own_command(*command), environment=environment, stop_order=stop_order
    )
