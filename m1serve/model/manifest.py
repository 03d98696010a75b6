"""Manifest: what a version directory must hold, byte by byte, and where it came from.

`serving/manifest.json`; it carries a digest of itself. No torch here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from m1serve.errors import WeightsError

SERVING, TRAINER = "serving", "trainer"
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """A sequence whose logprobs any engine that serves the version must reproduce."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """logprobs[i] = log p(token_ids[i + 1] | token_ids[: i + 1]); one fewer than token_ids"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    num_bytes: int
    sha256: str
    """'' for the files of serving tensors: each tensor has a digest of its own"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    weights_version: str
    parent: str | None
    run_id: str | None
    created_at: str
    """ISO 8601, UTC"""
    tensors: Mapping[str, str]
    """on-disk name of every serving tensor -> sha256 of its dtype, shape and bytes"""
    files: Mapping[str, FileRecord]
    """path below the version directory -> what it is, the manifest itself left out"""
    config_digest: str
    tokenizer_digest: str
    template_digest: str
    golden: tuple[Golden, ...]
    digest: str = ""
    """sha256 of all the above"""

    def sealed(self) -> Manifest:
        """With its digest filled in."""
        return replace(self, digest=self._own_digest())

    def write(self, path: Path) -> None:
        """Into a version directory."""
        file = path / SERVING / MANIFEST_FILE
        file.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def files_in(self, folder: str) -> dict[str, FileRecord]:
        """name -> record of the files of `serving` or `trainer`."""
        start = f"{folder}/"
        return {p.removeprefix(start): r for p, r in self.files.items() if p.startswith(start)}

    def _own_digest(self) -> str:
        content = {name: value for name, value in asdict(self).items() if name != "digest"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """The manifest of a version directory; WeightsError when it is absent, damaged or edited."""
    file = path / SERVING / MANIFEST_FILE
    try:
        manifest = _parsed(file.read_bytes())
    except OSError as error:
        raise WeightsError(
            f"cannot read {file} ({error.strerror}): not a version directory, or not a whole one"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightsError(
            f"{file} is damaged ({error!r}); restore it or serve another version"
        ) from error
    wanted = manifest.sealed().digest
    if manifest.digest != wanted:
        raise WeightsError(
            f"{file} was changed after it was written: its digest is {manifest.digest[:12]}, "
            f"its content has {wanted[:12]}; restore it or serve another version"
        )
    return manifest


def file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _parsed(content: bytes) -> Manifest:
    raw = json.loads(content)
    files = {name: FileRecord(**record) for name, record in raw["files"].items()}
    golden = tuple(
        Golden(token_ids=tuple(g["token_ids"]), logprobs=tuple(g["logprobs"]))
        for g in raw["golden"]
    )
    return Manifest(**{**raw, "files": files, "golden": golden})
