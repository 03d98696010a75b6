"""`m1serve cost --plot`: FLOPs against generation length, with the report's own points."""

from __future__ import annotations

from pathlib import Path

from m1serve.cost.paper import FIGURE_TFLOP, FIGURE_TOKENS, figure_curves
from m1serve.cost.report import Report
from m1serve.errors import ConfigError

COLORS = ("crimson", "tab:green", "tab:olive", "tab:orange")
POINT_COLORS = dict(
    zip(
        ("MiniMax-M1", "DeepSeek-R1", "Qwen3-235B-A22B"),
        ("crimson", "tab:green", "tab:orange"),
        strict=True,
    )
)
STEP = 1024


def write_plot(report: Report, path: Path) -> None:
    """The figure's own axes, 0 to 128K tokens and 1e16 FLOPs; absorbed MLA leaves them above."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 5.5), layout="constrained")
    lengths = range(0, FIGURE_TOKENS[-1] + 1, STEP)
    for shape, color in zip(report.shapes, COLORS, strict=True):
        flops = [shape.generation_flops(n) / 1e16 for n in lengths]
        axes.plot(lengths, flops, color=color, label=f"{shape.name} (computed)")
    for name, tflop in FIGURE_TFLOP.items():
        axes.plot(
            FIGURE_TOKENS,
            [value / 1e4 for value in tflop],
            "o",
            mfc="none",
            color=POINT_COLORS[name],
            label=f"{name} (report's figure, digitised)",
        )
    for name, curve in figure_curves().items():
        flops = [curve.at(n) / 1e16 for n in lengths]
        axes.plot(lengths, flops, ":", lw=1, color=POINT_COLORS[name])
    axes.plot([], [], "k:", lw=1, label="sums that fit the digitised points")
    ticks = range(0, FIGURE_TOKENS[-1] + 1, 32_768)
    axes.set(
        xlabel="generated tokens",
        ylabel="FLOPs of all of them (1e16)",
        xticks=list(ticks),
        xticklabels=[f"{tick // 1024}K" if tick else "0" for tick in ticks],
        xlim=(0, FIGURE_TOKENS[-1] * 1.02),
        ylim=(0, 7.5),
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize="small")
    try:
        figure.savefig(path, dpi=90)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--plot {path}: {error}; wanted a .png in a directory that exists"
        ) from error
    finally:
        plt.close(figure)
