"""`m1serve sft`: the cold start, a model of a recipe trained on demonstrations."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from m1serve.cli import options


def sft(
    recipe: Annotated[Path, typer.Option("--recipe", help="TOML file, see benchmarks/nano.")],
    out: Annotated[Path, typer.Option("--out", help="Model directory to write.")],
    init: Annotated[
        Path | None, typer.Option("--init", help="Model directory to go on from.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Instead of the recipe's.")] = None,
    max_seconds: Annotated[
        float, typer.Option("--max-seconds", help="The schedule ends by then.")
    ] = float("inf"),
    workers: Annotated[int, typer.Option("--workers", help="Processes that make batches.")] = 0,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda (default: the best there is).")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Trains a model from nothing (or from --init) on demonstrations."""
    from m1serve.online_rl.sft import main

    options.log_to_stderr()
    with Console(stderr=True).status(f"training {out}"):
        result = main(
            recipe,
            out,
            init=init,
            steps=steps,
            max_seconds=max_seconds,
            workers=workers,
            device=device,
        )
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        print(f"{out}: {result.steps} steps, {result.tokens} tokens, {result.seconds:.0f} s")
