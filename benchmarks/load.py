"""The shipped nano under load: a closed and an open loop, and 200 streams through Ray Serve.

    python benchmarks/load.py --out DIR [--seconds 20] [--only NAME ...]

Writes load.json and a picture of each run to DIR; every run has a fresh server, and its report the
command that makes the same load against any other. Exits with 1 when a request failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m1serve.clients import bench
from m1serve.clients.local_server import local_server

SETTLE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    name: str
    flags: tuple[str, ...]
    with_ray: bool


RUNS = (
    Run(name="closed", flags=("--concurrency", "16", "--max-tokens", "48"), with_ray=True),
    Run(
        name="open",
        flags=("--rate", "8", "--max-tokens", "48", "--abort-fraction", "0.1"),
        with_ray=True,
    ),
    Run(name="streams", flags=("--concurrency", "200", "--max-tokens", "48"), with_ray=True),
    Run(name="closed-uvicorn", flags=("--concurrency", "16", "--max-tokens", "48"), with_ray=False),
)


def measure(run: Run, directory: Path, seconds: float) -> dict[str, Any]:
    file = directory / f"load-{run.name}.json"
    flags = [*run.flags, "--duration", f"{seconds:g}", "--timeout", "300"]
    with (
        local_server("engine.num_slots=256", with_ray=run.with_ray) as server,
        redirect_stdout(sys.stderr),
    ):
        where = ["--base-url", f"{server.url}/v1", "--out", str(file)]
        bench.main([*where, *flags])
        left = server.load_when_settled(SETTLE_S)
    report: dict[str, Any] = json.loads(file.read_text())
    file.unlink()
    called = ["python", "-m", "m1serve.clients.bench", "--base-url", "URL", "--out", "FILE", *flags]
    return report | {
        "command": shlex.join(called),
        "server": "Ray Serve" if run.with_ray else "uvicorn",
        "left_over": left.slots_in_use + left.waiting + left.open_responses,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="directory; without it only JSON is printed")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", action="append", choices=[run.name for run in RUNS])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.out or Path(scratch)
        wanted = [run for run in RUNS if run.name in (options.only or [r.name for r in RUNS])]
        runs = {run.name: measure(run, directory, options.seconds) for run in wanted}
    called = ["python", "benchmarks/load.py", *sys.argv[1:]]
    report = {"command": shlex.join(called), "load_average": os.getloadavg()[0], "runs": runs}
    text = json.dumps(report, indent=1)
    if options.out:
        (options.out / "load.json").write_text(text + "\n")
    print(text)
    return int(any(run["errors"] or run["left_over"] or not run["done"] for run in runs.values()))


if __name__ == "__main__":
    sys.exit(main())
