"""The `m1serve` program: every command, and how an M1ServeError ends it (a line, exit code 2)."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from m1serve import __version__
from m1serve.cli import (
    bench,
    chat,
    cost,
    demo,
    doctor,
    keys,
    retrain,
    runs,
    serve,
    sft,
    sidecar,
    trainer,
    trajectories,
    up,
    weights,
    worker,
)
from m1serve.errors import M1ServeError

EXIT_REFUSED = 2

app = typer.Typer(
    name="m1serve",
    help="Serve MiniMax-M1-style models behind the OpenAI API and keep improving them online.",
    no_args_is_help=True,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def options_of_all(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    if version:
        print(f"m1serve {__version__}")
        raise typer.Exit


app.command("up")(up.up)
app.command("serve")(serve.serve)
app.command("sidecar")(sidecar.sidecar)
app.command("worker")(worker.worker)
app.command("trainer")(trainer.trainer)
app.command("retrain")(retrain.retrain)
app.command("sft")(sft.sft)
app.add_typer(runs.app, name="runs")
app.add_typer(weights.app, name="weights")
app.add_typer(trajectories.app, name="trajectories")
app.add_typer(keys.app, name="keys")
app.add_typer(bench.app, name="bench")
app.command("chat")(chat.chat)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("cost")(cost.cost)


def main() -> None:
    try:
        app()
    except M1ServeError as error:
        print(f"m1serve: {error}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
