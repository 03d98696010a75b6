"""Packaging: four links give the top-level directories their import name; no other name leaks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("kernels", "online_rl", "api", "clients")


@pytest.mark.parametrize("name", LINKED)
def test_the_link_resolves_to_the_directory_beside_the_package(name: str) -> None:
    link = ROOT / "m1serve" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert (link / "__init__.py").is_file()


def run_python(code: str, *, cwd: Path, python_path: str = "") -> str:
    environment = {**os.environ, "PYTHONPATH": python_path}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generic_names_are_not_importable_from_elsewhere(tmp_path: Path) -> None:
    code = (
        "from importlib.util import find_spec; import m1serve.errors; "
        f"print([n for n in {(*LINKED, 'deploy', 'tests')!r} if find_spec(n) is not None])"
    )
    assert run_python(code, cwd=tmp_path).strip() == "[]"


@pytest.mark.slow
def test_transformers_is_not_misled_by_our_kernels_directory(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    code = "import transformers.utils as u; print(u.is_kernels_available())"
    assert run_python(code, cwd=tmp_path, python_path=str(ROOT)).strip() == "False"


def test_every_module_has_its_line_in_the_structure_page() -> None:
    page = (ROOT / "docs" / "structure.md").read_text()
    folders = ("m1serve", "kernels", "api", "online_rl", "clients")
    modules = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
        and "migrations" not in path.parts
        and not any(parent.is_symlink() for parent in path.parents)
    }
    assert len(modules) > 100
    assert {module for module in modules if f"`{module}`" not in page} == set()
