"""Times our kernels beside their peers on one GPU in one run, checks them, and writes JSON.

    python -m m1serve.kernels.bench --fetch-peers DIR
    python -m m1serve.kernels.bench --peers DIR --out FILE.json
    python -m m1serve.kernels.bench --table FILE.json

A case that fails is a row that says so. A case that hangs, or breaks the CUDA context, ends its
process; the next process goes on behind it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from m1serve.kernels.benchmark.bars import bars
from m1serve.kernels.benchmark.peers_fetch import default_directory, fetch
from m1serve.kernels.benchmark.report import OURS, Report, read_report, table
from m1serve.kernels.benchmark.run import AGAIN, EXTRA_PARTS, PARTS, Plan, run

MAX_PROCESSES = 12


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every case ran and every check of ours passed; bars that are missed are only said."""
    options = parse(arguments)
    if options.fetch_peers is not None:
        fetch(options.fetch_peers)
        return 0
    if options.table is not None:
        try:
            report = read_report(options.table)
        except (OSError, ValueError, KeyError, TypeError) as error:
            sys.stderr.write(
                f"--table {options.table}: not a result of this benchmark: {error!r}\n"
            )
            return 2
        sys.stdout.write(table(report))
        return 0
    plan = Plan(
        command=options.command,
        out=options.out,
        peers=options.peers,
        only=options.only,
        is_quick=options.quick,
        notes=options.notes,
        budget_s=options.budget,
        case_timeout_s=options.case_timeout,
    )
    return run(plan) if options.child else supervise(plan, options.out)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="python -m m1serve.kernels.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cache = default_directory()
    parser.add_argument("--out", type=Path, default=Path("kernels-bench.json"), metavar="FILE")
    parser.add_argument(
        "--peers", type=Path, nargs="?", const=cache, metavar="DIR", help="time these peers too"
    )
    parser.add_argument(
        "--fetch-peers",
        type=Path,
        nargs="?",
        const=cache,
        metavar="DIR",
        help=f"download the peers' kernels with pip (about 370 MB, 6 MB kept; {cache}) and stop",
    )
    parser.add_argument("--quick", action="store_true", help="our rows only, without the longest")
    parser.add_argument("--only", type=_parts, default=PARTS, metavar=",".join(PARTS + EXTRA_PARTS))
    parser.add_argument("--notes", type=Path, metavar="FILE", help="a text file, one note a line")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print a result as Markdown")
    parser.add_argument(
        "--budget", type=float, default=480, metavar="S", help="no peer's case starts after it"
    )
    parser.add_argument(
        "--case-timeout", type=float, default=120, metavar="S", help="one case hangs after it"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.peers is not None and not options.peers.is_dir():
        parser.error(f"--peers {options.peers} is not a directory: fetch them with --fetch-peers")
    words = [word for word in given if word != "--child"]
    options.command = shlex.join(["python", "-m", "m1serve.kernels.bench", *words])
    return options


def supervise(plan: Plan, out: Path) -> int:
    """Processes one after another until one comes to the end; the report grows in the file."""
    out.unlink(missing_ok=True)
    words = shlex.split(plan.command)[1:]
    for _ in range(MAX_PROCESSES):
        child = subprocess.run([sys.executable, *words, "--child"], check=False, env=os.environ)
        if child.returncode not in (AGAIN, *CRASHES):
            break
    if not out.exists():
        return child.returncode or 1
    report = read_report(out)
    sys.stdout.write(summary(report) + f"\n{out}\n")
    has_errors = any(row.error for row in report.rows if row.impl == OURS)
    return child.returncode or int(has_errors or bool(report.failed_checks))


# a segmentation fault and an abort: the case at hand is already in the report as unfinished
CRASHES = (-11, -6)


def summary(report: Report) -> str:
    """The table, then what failed, then the bars: the end of a log is what is read."""
    best = report.best
    lines = [table(report)]
    lines += [f"failed {row.key}: {row.error}" for row in report.rows if row.error]
    for check in report.checks:
        if not check.ok:
            kind = "check failed" if check.impl == OURS else "finding"
            error = f"{check.worst_head_error:.3g} > {check.bar:g} {check.error}"
            lines.append(f"{kind}: {check.key}: {error}")
    ours, peers = (
        [check.ok for check in report.checks if (check.impl == OURS) is is_ours]
        for is_ours in (True, False)
    )
    lines.append(
        f"checks that pass: ours {sum(ours)} of {len(ours)}, peers' {sum(peers)} of {len(peers)}"
    )
    lines.append(f"copy {best.copy_tb_s:.2f} TB/s, GEMM {best.gemm_tflop_s:.0f} TFLOP/s")
    return "\n".join([*lines, *map(str, bars(report))])


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    for part in parts:
        if part not in PARTS + EXTRA_PARTS:
            known = ", ".join(PARTS + EXTRA_PARTS)
            raise argparse.ArgumentTypeError(f"{part} is not one of {known}")
    return parts


if __name__ == "__main__":
    sys.exit(main())
