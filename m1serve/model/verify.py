"""verify_version: is a version directory what was written, and a model this code runs?"""

from __future__ import annotations

from pathlib import Path

from m1serve.errors import WeightsError
from m1serve.model.checkpoint import wanted_shapes
from m1serve.model.directory import CONFIG_FILE, read_config
from m1serve.model.manifest import (
    MANIFEST_FILE,
    SERVING,
    Manifest,
    file_sha256,
    read_manifest,
)
from m1serve.model.tensor_file import stored_tensors, tensor_digests
from m1serve.model.token_ids import TOKENIZER_FILE


def verify_version(path: Path, *, weights_version: str | None = None) -> Manifest:
    """Checks every file and tensor of `serving/`; raises WeightsError saying which one is wrong.

    With `weights_version` the directory must also hold that very version.
    """
    manifest = read_manifest(path)
    if weights_version not in (None, manifest.weights_version):
        raise WeightsError(
            f"{path} holds {manifest.weights_version}, wanted {weights_version}; "
            "correct the path that the version is registered with"
        )
    _check_files(path, manifest)
    _check_shapes(path, manifest)
    _check_tensors(path, manifest)
    return manifest


def serving_weight_files(path: Path, manifest: Manifest) -> list[Path]:
    names = manifest.files_in(SERVING)
    return [path / SERVING / name for name in sorted(names) if name.endswith(".safetensors")]


def _check_files(path: Path, manifest: Manifest) -> None:
    folder = path / SERVING
    records = manifest.files_in(SERVING)
    present = {p.relative_to(folder).as_posix() for p in folder.rglob("*")} - {MANIFEST_FILE}
    if missing := sorted(records.keys() - present):
        raise _refused(manifest, f"files are missing: {missing}")
    if unknown := sorted(present - records.keys()):
        raise _refused(manifest, f"there are files that the manifest does not know: {unknown}")
    for name, record in records.items():
        if record.sha256 and file_sha256(folder / name) != record.sha256:
            raise _refused(manifest, f"{name} {_what_changed(name)}")
        num_bytes = (folder / name).stat().st_size
        if num_bytes < record.num_bytes:
            raise _refused(
                manifest, f"{name} is truncated: {num_bytes} of {record.num_bytes} bytes"
            )
        if num_bytes > record.num_bytes:
            raise _refused(manifest, f"{name} has {num_bytes} bytes, wanted {record.num_bytes}")


def _what_changed(name: str) -> str:
    if name == CONFIG_FILE:
        return "was changed: it describes another architecture than the weights were made for"
    if name == TOKENIZER_FILE:
        return "is the wrong tokenizer: not the one that these weights were trained with"
    return "has other bytes than were written"


def _check_shapes(path: Path, manifest: Manifest) -> None:
    """The tensors are those of the config, before any memory is spent on them."""
    wanted = wanted_shapes(read_config(path / SERVING))
    found = {
        name: tensor.shape
        for file in serving_weight_files(path, manifest)
        for name, tensor in stored_tensors(file).items()
    }
    for name, shape in wanted.items():
        if name not in found:
            raise _refused(manifest, f"tensor {name} is missing")
        if found[name] != shape:
            raise _refused(
                manifest,
                f"tensor {name} is {list(found[name])}, the architecture of {CONFIG_FILE} "
                f"wants {list(shape)}",
            )


def _check_tensors(path: Path, manifest: Manifest) -> None:
    found: dict[str, str] = {}
    for file in serving_weight_files(path, manifest):
        found |= tensor_digests(file)
    for name, sha256 in manifest.tensors.items():
        if name not in found:
            raise _refused(manifest, f"tensor {name} is missing")
        if found[name] != sha256:
            raise _refused(
                manifest,
                f"tensor {name} has other bytes than were written "
                f"(sha256 {found[name][:12]}, wanted {sha256[:12]})",
            )
    if unknown := sorted(found.keys() - manifest.tensors.keys()):
        raise _refused(manifest, f"there are tensors that the manifest does not know: {unknown}")


def _refused(manifest: Manifest, problem: str) -> WeightsError:
    fallback = f"serve its parent {manifest.parent}" if manifest.parent else "import it again"
    return WeightsError(
        f"{manifest.weights_version} must not serve: {problem}. Restore the directory from a copy, "
        f"or {fallback}"
    )
