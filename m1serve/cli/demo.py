"""`m1serve demo`: the whole loop on this machine, from a request to better weights, measured.

Starts the product in a fresh home and drives it over HTTP: held-out tasks before, cycles of play,
scores and training, a poisoned candidate, the same tasks after. The exit code says whether the bars
held.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from m1serve.cli import options
from m1serve.cli.console import wide_console
from m1serve.cli.ports import pick_free

if TYPE_CHECKING:
    from m1serve.cli.demo_run import Demonstrated
    from m1serve.config import Settings

SMALL_GATE = ("gate.tasks_per_family=8",)
"""Noisy, but the poisoned candidate fails the limits by far."""


def demo(
    out: Annotated[Path, typer.Option("--out", help="Where the report goes.")] = Path(
        "demo-report"
    ),
    small: Annotated[
        bool, typer.Option("--small", help="Reduced: proves the mechanism, not the gain.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the product running.")] = False,
    cycles: Annotated[int | None, typer.Option("--cycles", help="Instead of 9 (small: 2).")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Other tasks.", min=0, max=900)] = 0,
    config: options.ConfigFile = None,
    overrides: options.Overrides = None,
    model: options.Model = None,
    port: options.Port = None,
    admin_port: options.AdminPort = None,
    no_ray: options.NoRay = False,
) -> None:
    """Serves, plays, scores, trains, swaps and measures; writes a report."""
    started = time.monotonic()
    settings = options.read_settings(
        config=config,
        home=out / "home",
        overrides=[*(SMALL_GATE if small else ()), *(overrides or [])],
        model=model,
        port=port or pick_free(),
        admin_port=admin_port or pick_free(),
        no_ray=no_ray,
    )
    console = wide_console()
    done = _demonstrate(
        settings, console, started=started, small=small, keep=keep, cycles=cycles, seed=seed
    )
    raise typer.Exit(_conclude(done, out.absolute(), console, settings if keep else None))


def _demonstrate(
    settings: Settings,
    console: Console,
    *,
    started: float,
    small: bool,
    keep: bool,
    cycles: int | None,
    seed: int,
) -> Demonstrated:
    from dataclasses import replace

    from m1serve.cli.demo_plan import FULL, SMALL
    from m1serve.cli.demo_product import Product, fresh_home
    from m1serve.cli.demo_run import run_demo
    from m1serve.cli.demo_screen import Screen

    screen = Screen(console)
    size = SMALL if small else FULL
    size = replace(size, num_cycles=cycles) if cycles is not None else size
    fresh_home(settings.home)
    product = Product(settings, is_kept=keep)
    is_done = False
    try:
        with screen.waiting("starting the product"):
            product.wait_until_ready()
        screen.line(f"serving at {product.url} after {time.monotonic() - started:.0f} s")
        done = run_demo(
            product,
            screen,
            size=size,
            seed=seed,
            started=started,
            is_small=small,
            export=settings.home.parent / "trajectories.jsonl",
        )
        is_done = True
        return done
    finally:
        if not (keep and is_done):
            with screen.waiting("stopping the product"):
                product.stop()


def _conclude(done: Demonstrated, out: Path, console: Console, kept: Settings | None) -> int:
    """Prints and writes everything; returns the exit code."""
    from m1serve.cli.demo_plot import write_plot
    from m1serve.cli.demo_report import as_json, bars, summary
    from m1serve.cli.demo_tables import print_report

    report = done.report
    console.print(done.transcripts, markup=False, highlight=False)
    print_report(console, report)
    (out / "report.json").write_text(json.dumps(as_json(report), indent=1) + "\n")
    write_plot(report, out / "learning.png")
    console.print(f"report: {out}/report.json, learning.png, trajectories.jsonl")
    if kept is not None:
        console.print(
            f"still serving at http://{kept.serve.host}:{kept.serve.port}/v1; "
            f"stop it with kill {done.pid}",
            highlight=False,
        )
    print(f"M1SERVE_DEMO {json.dumps(summary(report))}", flush=True)
    return 0 if all(bar.is_met for bar in bars(report)) else 1
