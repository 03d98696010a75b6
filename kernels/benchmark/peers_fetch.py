"""Fetches the peers' kernels from their PyPI wheels; what is fetched is never part of this package.

python -m m1serve.kernels.bench --fetch-peers DIR
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Wheel:
    """A pinned wheel and the files that the comparison needs of it."""

    requirement: str
    patterns: tuple[str, ...]
    folder: str = ""


# the folder of whole packages, which goes onto the import path; single files lie beside it
SITE = "site"
WHEELS = (
    # the operators of flash-linear-attention, which is otherwise layers and models
    Wheel("fla-core==0.6.0", ("fla/*", "fla_core-*.dist-info/METADATA"), SITE),
    Wheel("einops==0.8.2", ("einops/*.py",), SITE),
    Wheel("vllm==0.32.0", ("vllm/model_executor/layers/lightning_attn.py",)),
    Wheel("sglang==0.5.23", ("sglang/kernels/ops/attention/linear/seg_la.py",)),
)
# only Python sources are taken, so the wheel of any one platform will do
PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "any")
PYTHON_VERSION = "3.12"


def default_directory() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "m1serve" / "peer-kernels"


def download_command(requirement: str, into: Path) -> list[str]:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", PYTHON_VERSION, "--dest", str(into)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    return [*command, requirement]


def extract(wheel_file: Path, patterns: tuple[str, ...], into: Path) -> list[str]:
    """The names extracted. A wheel without one of the wanted files is an error."""
    with zipfile.ZipFile(wheel_file) as archive:
        names = archive.namelist()
        wanted = [n for n in names if any(fnmatch(n, pattern) for pattern in patterns)]
        for pattern in patterns:
            if not any(fnmatch(name, pattern) for name in names):
                raise ValueError(f"{wheel_file.name} holds no {pattern}: another version?")
        archive.extractall(into, wanted)
    return wanted


def fetch(directory: Path, wheels: tuple[Wheel, ...] = WHEELS) -> None:
    """Downloads each wheel with pip, keeps the needed files in `directory`, drops the wheel."""
    directory.mkdir(parents=True, exist_ok=True)
    for wheel in wheels:
        with tempfile.TemporaryDirectory() as holder:
            subprocess.run(download_command(wheel.requirement, Path(holder)), check=True)
            (wheel_file,) = Path(holder).glob("*.whl")
            extract(wheel_file, wheel.patterns, directory / wheel.folder)
