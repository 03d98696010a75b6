"""`learning.png`: success by version while training, and by family before and after."""

from __future__ import annotations

from pathlib import Path

from m1serve.cli.demo_report import Report, rate_of
from m1serve.clients.stats import Interval, wilson


def write_plot(report: Report, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (by_version, by_family) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    trained = [wilson(round(c.success * c.num_episodes), c.num_episodes) for c in report.cycles]
    places = list(range(len(trained)))
    by_version.errorbar(
        places,
        [r.value for r in trained],
        yerr=_errors(trained),
        marker="o",
        label="training tasks",
    )
    ends = [report.before.rate, report.after.rate]
    by_version.errorbar(
        [0, len(trained)],
        [r.value for r in ends],
        yerr=_errors(ends),
        fmt="s",
        capsize=4,
        label="held-out tasks",
    )
    by_version.set(xlabel="training cycle", ylabel="success", ylim=(0, 1))
    by_version.legend()
    families = report.families
    for label, evaluation, offset in (
        ("before", report.before, -0.2),
        ("after", report.after, 0.2),
    ):
        rates = [rate_of(evaluation.of_family(family)) for family in families]
        by_family.bar(
            [i + offset for i in range(len(families))],
            [r.value for r in rates],
            width=0.4,
            yerr=_errors(rates),
            capsize=2,
            label=f"{label} ({evaluation.weights_version})",
        )
    by_family.set(xticks=range(len(families)), xticklabels=families, ylim=(0, 1))
    by_family.tick_params(axis="x", rotation=30)
    by_family.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _errors(rates: list[Interval]) -> list[list[float]]:
    return [[r.value - r.low for r in rates], [r.high - r.value for r in rates]]
