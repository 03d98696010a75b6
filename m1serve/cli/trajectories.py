"""`m1serve trajectories`: what the ledger holds, for people and for other programs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from m1serve.cli import options
from m1serve.cli.console import wide_console
from m1serve.errors import ConfigError

if TYPE_CHECKING:
    from m1serve.store import Store
    from m1serve.store.views import TrajectoryView

app = typer.Typer(help="Trajectories: list, show, export, erase.", no_args_is_help=True)


class ExportFormat(StrEnum):
    JSONL = "jsonl"
    PARQUET = "parquet"


class TrajectoryState(StrEnum):
    """The words of the ledger's state column."""

    PENDING = "pending"
    ELIGIBLE = "eligible"
    CLAIMED = "claimed"
    CONSUMED = "consumed"
    RELEASED = "released"
    BURNED = "burned"
    INELIGIBLE = "ineligible"


State = Annotated[TrajectoryState | None, typer.Option("--state", help="Only those.")]


@app.command("list")
def list_trajectories(
    config: options.ConfigFile = None,
    home: options.Home = None,
    overrides: options.Overrides = None,
    state: State = None,
    session: Annotated[str | None, typer.Option("--session")] = None,
    group: Annotated[str | None, typer.Option("--group")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1)] = 20,
    as_json: options.AsJson = False,
) -> None:
    """Newest first."""
    settings = options.read_settings(config=config, home=home, overrides=overrides)
    with options.open_store(settings) as store:
        rows = store.ledger.list_trajectories(
            state=state, session_id=session, group_key=group, limit=limit
        )
        counts = store.ledger.count_trajectories()
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    table = Table()
    for name in (
        "trajectory",
        "session",
        "task",
        "mode",
        "turns",
        "tokens",
        "state",
        "reward",
        "why",
    ):
        table.add_column(name, no_wrap=name == "trajectory")
    for row in rows:
        table.add_row(
            row.trajectory_id,
            row.session_id,
            row.task_id or "",
            row.mode,
            str(row.num_turns),
            str(row.num_completion),
            row.state,
            "" if row.reward is None else f"{row.reward:g}",
            row.state_reason,
        )
    console = wide_console()
    console.print(table)
    console.print(", ".join(f"{name} {num}" for name, num in sorted(counts.items())) or "none yet")


@app.command("show")
def show(
    trajectory: Annotated[str, typer.Argument(help="Trajectory id, or how the one begins.")],
    config: options.ConfigFile = None,
    home: options.Home = None,
    overrides: options.Overrides = None,
    as_json: options.AsJson = False,
) -> None:
    """One trajectory: its text with the weights that sampled it, and every verdict on it."""
    settings = options.read_settings(config=config, home=home, overrides=overrides)
    with options.open_store(settings) as store:
        view = store.ledger.trajectory(store.ledger.resolve(trajectory))
        verdicts = [asdict(reward) for reward in store.rewards.list(view.trajectory_id)]
        if as_json:
            print(json.dumps({**asdict(view), "rewards": verdicts}))
            return
        print(_as_text(store, view))
        for verdict in verdicts:
            print(
                f"{verdict['scorer']} {verdict['scorer_version']}: {verdict['value']} "
                f"({verdict['status']}) {verdict['evidence']}"
            )


@app.command("export")
def export(
    config: options.ConfigFile = None,
    home: options.Home = None,
    overrides: options.Overrides = None,
    state: State = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write (default: standard output).")
    ] = None,
    form: Annotated[
        ExportFormat,
        typer.Option("--format", help="JSON lines: one a trajectory. Parquet: a row a turn."),
    ] = ExportFormat.JSONL,
) -> None:
    """Token ids, logprobs, flags and versions of what was not erased, oldest first."""
    settings = options.read_settings(config=config, home=home, overrides=overrides)
    if form is ExportFormat.PARQUET and out is None:
        raise ConfigError("Parquet is no text for a terminal; name a file with --out FILE")
    with options.open_store(settings) as store:
        if out is None:
            store.ledger.export(sys.stdout, state=state)
            return
        with Console(stderr=True).status(f"writing {out}"):
            if form is ExportFormat.PARQUET:
                from m1serve.store.parquet import write_parquet

                num = write_parquet(store.ledger.all_trajectories(state=state), out)
            else:
                with out.open("w") as stream:
                    num = store.ledger.export(stream, state=state)
    print(f"{num} trajectories in {out}", file=sys.stderr)


@app.command("erase")
def erase(
    session: Annotated[str, typer.Option("--session", help="Session id.")],
    config: options.ConfigFile = None,
    home: options.Home = None,
    overrides: options.Overrides = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Whose session, where several have the name.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Forgets a session: tokens and text go for good; says which weights learned from it."""
    settings = options.read_settings(config=config, home=home, overrides=overrides)
    with options.open_store(settings) as store:
        tenants = store.ledger.tenants_of(session) if tenant is None else [tenant]
        if len(tenants) > 1:
            raise ConfigError(
                f"tenants {', '.join(tenants)} have a session {session!r}; name one by --tenant"
            )
        owner = tenants[0] if tenants else "default"
        erasure = store.ledger.erase(owner, session, actor="cli")
    if as_json:
        print(json.dumps(asdict(erasure)))
        return
    print(f"erased {erasure.num_turns} turns and {erasure.num_blocks} prompt blocks of {session}")
    learned = ", ".join(erasure.trained_versions) or "none"
    print(f"weights that learned from it: {learned}")


def _as_text(store: Store, view: TrajectoryView) -> str:
    """The last turn's prompt holds the whole conversation; what was sampled is marked by turn."""
    from m1serve.chat.tokenizer import ChatTokenizer

    target = store.weights.target(view.model_id)
    if target is None or not view.turns:
        return f"{view.trajectory_id}: no text, {len(view.turns)} turns"
    tokenizer = ChatTokenizer.load(Path(target.path) / "serving")
    lines = [tokenizer.decode(view.turns[0].prompt_ids)]
    for number, turn in enumerate(view.turns):
        versions = ", ".join(span.weights_version for span in turn.version_spans)
        if number:
            before = view.turns[number - 1]
            known = len(before.prompt_ids) + len(before.completion_ids)
            lines.append(tokenizer.decode(turn.prompt_ids[known:]))
        lines.append(f"--- turn {number} sampled by {versions}: {turn.stop} ---")
        lines.append(tokenizer.decode(turn.completion_ids))
    return "\n".join(lines)
