"""Hostile requests, aborts and 200 streams at once on a real server, over uvicorn and Ray Serve."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def run(script: str, *flags: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    report = json.loads(done.stdout)
    assert isinstance(report, dict)
    return report


@pytest.mark.parametrize("server", [(), ("--ray",)], ids=["uvicorn", "ray"])
def test_hostile_requests_break_nothing(server: tuple[str, ...]) -> None:
    report = run("hostile.py", "--requests", "400", "--seed", "1", *server)
    assert report["requests"] == sum(report["by_status"].values()) == 400
    assert report["engine_alive"]
    assert (report["status_5xx"], report["wrong"]) == (0, 0), report["first_wrong"]
    assert (report["leaked_slots"], report["stuck_requests"]) == (0, 0)
    # bent bodies are sometimes still fine: the engine was really asked
    assert report["by_status"]["200"] > 20


@pytest.mark.parametrize("server", [(), ("--ray",)], ids=["uvicorn", "ray"])
def test_aborts_at_random_moments_leave_nothing(server: tuple[str, ...]) -> None:
    report = run("aborts.py", "--aborts", "250", "--seed", "1", *server)
    assert report["aborts"] >= 250
    assert min(report["by_moment"].values()) > 5
    assert (report["leaked_slots"], report["stuck_requests"]) == (0, 0)
    assert report["still_answers"]


def test_200_streams_at_once_through_ray_serve_all_end_well() -> None:
    report = run("load.py", "--only", "streams", "--seconds", "2")
    streams = report["runs"]["streams"]
    assert streams["server"] == "Ray Serve"
    assert streams["errors"] == {}
    assert streams["done"] == streams["requests"] >= 200
    assert streams["left_over"] == 0
