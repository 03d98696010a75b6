"""The demo's tables and transcripts, for a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from m1serve.cli.demo_report import Cycle, Report, bars, rate_of, worst
from m1serve.clients.stats import Interval


def print_report(console: Console, report: Report) -> None:
    console.print(family_table(report))
    console.print(cycle_table([*report.cycles, report.poisoned]))
    console.print(facts_table(report))
    for bar in bars(report):
        console.print(
            f"{'[green]held  [/green]' if bar.is_met else '[red]MISSED[/red]'} {bar.text}"
        )


def family_table(report: Report) -> Table:
    num = len(report.before.successes)
    table = Table(title=f"Success on {num} held-out tasks, 95% intervals", title_justify="left")
    for name in ("family", "before", "after", "gain"):
        table.add_column(name, justify="left" if name == "family" else "right")
    for family in report.families:
        table.add_row(
            family,
            _percent(rate_of(report.before.of_family(family))),
            _percent(rate_of(report.after.of_family(family))),
            _points(report.gain(family)),
        )
    table.add_section()
    table.add_row(
        "all", _percent(report.before.rate), _percent(report.after.rate), _points(report.gain())
    )
    return table


def cycle_table(cycles: Sequence[Cycle]) -> Table:
    table = Table(title="Cycles: episodes sampled by each version, and what came of them")
    table.title_justify = "left"
    for name in ("sampled by", "episodes", "success", "tokens", "outcome", "now serving"):
        table.add_column(name, justify="right")
    for name in ("mismatch", "fork p95", "fork max", "swap ms", "play/score/train s"):
        table.add_column(name, justify="right")
    for cycle in cycles:
        metrics = cycle.metrics
        table.add_row(
            cycle.parent_version,
            str(cycle.num_episodes),
            f"{cycle.success:.1%}",
            str(cycle.num_tokens),
            cycle.outcome,
            cycle.weights_version,
            _number(metrics.get("mismatch_mean"), "{:.1e}"),
            _number(metrics.get("fork_weight_p95"), "{:.3f}"),
            _number(metrics.get("fork_weight_max"), "{:.2f}"),
            _number(cycle.swap_ms, "{:.0f}"),
            "/".join(f"{cycle.seconds.get(name, 0):.0f}" for name in ("play", "score", "train")),
        )
    return table


def facts_table(report: Report) -> Table:
    table = Table(show_header=False, title="Loop", title_justify="left")
    last = report.promoted[-1].metrics if report.promoted else {}
    names = ("p50", "p95", "p99", "max")
    rows = {
        "trajectories": str(report.num_trajectories),
        "tokens sampled": str(report.num_tokens),
        "requests, failed": f"{report.num_requests}, {len(report.failures)}",
        "versions promoted": str(len(report.promoted)),
        "process restarts": str(report.num_restarts),
        "mismatch KL, worst run": _number(worst(report.cycles, "mismatch_kl"), "{:.1e}"),
        "clip weights p50/p95/p99/max": _quantiles(last, "weight", names),
        "the same over forks (p < 0.8)": _quantiles(last, "fork_weight", names),
        "seconds": f"{report.seconds:.0f}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def transcript(messages: Sequence[Mapping[str, object]]) -> str:
    """One episode as text, without the system message."""
    return "\n".join(_said(message) for message in messages if message["role"] != "system")


def _said(message: Mapping[str, object]) -> str:
    parts = [f"{message['role']}:"]
    if message.get("reasoning_content"):
        parts.append(f"<think> {message['reasoning_content']} </think>")
    if message.get("content"):
        parts.append(str(message["content"]))
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        parts += [_call(call["function"]) for call in calls]
    return " ".join(" ".join(parts).split())


def _call(function: Mapping[str, object]) -> str:
    try:
        arguments = json.loads(str(function["arguments"]))
    except json.JSONDecodeError:
        return f"-> {function['name']}({function['arguments']})"
    if not isinstance(arguments, dict):
        return f"-> {function['name']}({arguments!r})"
    inside = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"-> {function['name']}({inside})"


def _quantiles(metrics: Mapping[str, float], stem: str, names: Sequence[str]) -> str:
    return " / ".join(_number(metrics.get(f"{stem}_{name}"), "{:.3f}") for name in names)


def _percent(rate: Interval) -> str:
    return f"{rate.value:.1%} [{rate.low:.0%}, {rate.high:.0%}]"


def _points(gain: Interval) -> str:
    return f"{100 * gain.value:+.1f} [{100 * gain.low:+.0f}, {100 * gain.high:+.0f}]"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
