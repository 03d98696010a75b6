"""docs/public-bugs.md names tests that exist, and every row says something."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "public-bugs.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| ([A-G]\d+) \| (.+) \|$", PAGE, re.M))
FIRST = {
    *("A1", "A2", "A3", "A4", "A7", "A8", "A10", "A11", "A12", "A13", "A16", "A19", "A20"),
    *("B1", "B2", "B4", "B5", "B7", "B8", "B10", "B11", "B13", "B14", "B15"),
    *("C1", "C2", "C3", "C6", "C7", "C9", "C10", "C11", "C14", "C15", "C17"),
    *("D1", "D2", "D3", "D5", "D7", "D9", "D10", "E1", "E2", "F1", "F3", "F7", "F10"),
    *("G1", "G2", "G4", "G5", "G7", "G11"),
}
"""Rows of the first priority: none may go without a test."""


def test_every_important_row_is_there() -> None:
    assert FIRST - ROWS.keys() == set()


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_of_a_row_exist(row: str) -> None:
    tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", ROWS[row])
    assert tests or "no test: " in ROWS[row]
    assert tests or row not in FIRST
    for file, name in tests:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text("utf-8"), re.M), name


def test_every_test_here_is_in_the_table() -> None:
    for file in Path(__file__).parent.glob("test_*.py"):
        if file.name != Path(__file__).name:
            for name in re.findall(r"^(?:async )?def (test_\w+)\(", file.read_text("utf-8"), re.M):
                assert f"`tests/public_bugs/{file.name}::{name}`" in PAGE
