"""Where CI requires the services, a test that skips for want of one is a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SKIPPED = """
import pytest

@pytest.mark.services
def test_needs_a_service():
    pytest.skip("TEST_REDIS_URL is not set")

def test_skips_for_another_reason():
    pytest.skip("no GPU")
"""


@pytest.mark.parametrize(("required", "code"), [("1", 1), ("", 0)])
def test_a_skipped_service_fails_only_where_required(
    tmp_path: Path, required: str, code: int
) -> None:
    (tmp_path / "test_skipped.py").write_text(SKIPPED)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = services\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-rs", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS), "CI_REQUIRE_SERVICES": required},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout
    assert ("1 failed, 1 skipped" if required else "2 skipped") in done.stdout
    assert "TEST_REDIS_URL is not set" in done.stdout
