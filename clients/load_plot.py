"""A load as a picture: each request by its start, and how latencies are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from m1serve.clients.load_report import Answer

_COLOURS = {"done": "tab:blue", "aborted": "tab:orange", "error": "tab:red"}


def save_plot(file: Path, title: str, answers: Sequence[Answer]) -> None:
    """A PNG."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    over_time, spread = figure.subplots(1, 2)
    _over_time(over_time, answers)
    _spread(spread, answers)
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=80)


def _over_time(axes: Axes, answers: Sequence[Answer]) -> None:
    for outcome, colour in _COLOURS.items():
        these = [answer for answer in answers if answer.outcome == outcome]
        if these:
            axes.scatter(
                [answer.started_s for answer in these],
                [answer.total_s for answer in these],
                s=6,
                color=colour,
                label=f"{len(these)} {outcome}",
            )
    axes.set(xlabel="request began (s)", ylabel="until its end (s)", ylim=(0, None))
    if answers:
        axes.legend(loc="best", fontsize=8)


def _spread(axes: Axes, answers: Sequence[Answer]) -> None:
    done = [answer for answer in answers if answer.outcome == "done"]
    curves = {
        "time a token": [t for a in done if (t := a.inter_token_s) is not None],
        "first token": [a.ttft_s for a in done if a.ttft_s is not None],
        "end to end": [a.total_s for a in done],
    }
    for name, seconds in curves.items():
        if seconds:
            values = np.sort(np.array(seconds)) * 1e3
            axes.step(values, np.arange(1, len(values) + 1) / len(values), label=name)
    axes.set(xlabel="ms", ylabel="share of the requests that were done", ylim=(0, 1))
    if done:
        axes.set_xscale("log")
        axes.legend(loc="lower right", fontsize=8)
