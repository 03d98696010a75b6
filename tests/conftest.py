"""Rules for every test: one compute thread; no silent skip of a service where CI forbids it."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "shared" / "data" / "m1"

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With CI_REQUIRE_SERVICES=1 a skipped `services` test is a failed one."""
    report = yield
    is_required = os.environ.get("CI_REQUIRE_SERVICES") == "1"
    if report.skipped and is_required and item.get_closest_marker("services") is not None:
        report.outcome = "failed"
        report.longrepr = f"CI_REQUIRE_SERVICES=1 and {item.nodeid} was skipped: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def m1_data() -> Path:
    """MiniMax's own config, index and golden file, read in place."""
    if not DATA.is_dir():
        pytest.skip(f"MiniMax's reference data is not at {DATA}")
    return DATA
