"""Version directories, `<root>/<model_id>/<n>/`: what engines load and what runs start from.

serving/  config.json, *.safetensors, tokenizer.json, manifest.json
trainer/  state.safetensors (fp32 masters, moments, rng), meta.json
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from m1serve.chat.template import template_digest
from m1serve.chat.tokenizer import BOD, BOS, ChatTokenizer
from m1serve.errors import WeightsError
from m1serve.model.checkpoint import load_model, require_memory, save_model
from m1serve.model.directory import CONFIG_FILE, INDEX_FILE, read_config, weight_files
from m1serve.model.golden import golden_gap, record_golden, sample_sequences
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.manifest import (
    SERVING,
    TRAINER,
    FileRecord,
    Golden,
    Manifest,
    file_sha256,
    read_manifest,
)
from m1serve.model.staging import remove_whole, staged
from m1serve.model.tensor_file import stored_tensors, tensor_digests
from m1serve.model.token_ids import TOKENIZER_FILE, resolve_token_ids
from m1serve.model.verify import verify_version

__all__ = [
    "FileRecord",
    "Golden",
    "Manifest",
    "discard_version",
    "golden_gap",
    "import_model_dir",
    "load_trainer",
    "load_version",
    "read_manifest",
    "verify_version",
    "version_path",
    "write_version",
]

TRAINER_TENSORS, TRAINER_META = "state.safetensors", "meta.json"
_WEIGHTS_VERSION = re.compile(r"(?P<model_id>[A-Za-z0-9][A-Za-z0-9._-]*)@(?P<number>0|[1-9]\d*)")


def version_path(root: Path, weights_version: str) -> Path:
    """Where `<model_id>@<n>` lives."""
    match = _WEIGHTS_VERSION.fullmatch(weights_version)
    if match is None:
        raise WeightsError(
            f"{weights_version!r} is no weights version; wanted <model_id>@<number> with letters, "
            "digits, '.', '_' and '-' in the model id, as in nano@3"
        )
    return root / match["model_id"] / match["number"]


def write_version(
    root: Path,
    *,
    weights_version: str,
    model: M1ForCausalLM,
    tokenizer_file: Path,
    parent: str | None,
    run_id: str | None,
    golden_prompts: Sequence[Sequence[int]],
    trainer_tensors: dict[str, Tensor] | None = None,
    trainer_meta: Mapping[str, object] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Writes a whole version or nothing; returns its directory.

    Serving tensors are stored in `dtype` (the router in fp32). The golden logprobs are those of the
    stored weights, loaded back. Raises StoreError when the version exists or the disk is full.
    """
    resolve_token_ids(model.config, tokenizer_file)
    target = version_path(root, weights_version)
    with staged(target) as folder:
        serving = folder / SERVING
        save_model(model, serving, dtype=dtype)
        shutil.copyfile(tokenizer_file, serving / TOKENIZER_FILE)
        if trainer_tensors is not None:
            _save_trainer(folder / TRAINER, trainer_tensors, trainer_meta or {})
        golden = record_golden(load_model(serving), golden_prompts)
        _seal(folder, weights_version, parent=parent, run_id=run_id, golden=golden)
    return target


def load_version(
    path: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    weights_version: str | None = None,
) -> tuple[M1ForCausalLM, Manifest]:
    """Verifies `serving/`, then loads it."""
    manifest = verify_version(path, weights_version=weights_version)
    return load_model(path / SERVING, device=device, dtype=dtype), manifest


def load_trainer(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The trainer's tensors and meta, checked against the manifest."""
    records = read_manifest(path).files_in(TRAINER)
    if not records:
        raise WeightsError(
            f"{path} was written without trainer state; start from its serving weights instead"
        )
    for name, record in records.items():
        file = path / TRAINER / name
        if not file.is_file() or file_sha256(file) != record.sha256:
            state = "damaged" if file.is_file() else "missing"
            raise WeightsError(
                f"{file} is {state}; restore it, or start from the serving weights of {path} "
                "with fresh optimizer moments"
            )
    meta: dict[str, object] = json.loads((path / TRAINER / TRAINER_META).read_text())
    return load_file(path / TRAINER / TRAINER_TENSORS), meta


def import_model_dir(root: Path, *, model_id: str, model_dir: Path) -> Path:
    """Makes `<model_id>@0` of a plain model directory, byte for byte; returns its directory.

    A second call finds the version again, and refuses if the model directory has changed since.
    """
    target = version_path(root, f"{model_id}@0")
    files = _model_files(model_dir)
    if target.exists():
        _check_same(target, files)
        return target
    # its golden logprobs are computed here; reading the config refuses another model's tokenizer
    require_memory(read_config(model_dir))
    for file in weight_files(model_dir):
        # a broken file is named where it lies, not by its copy
        stored_tensors(file)
    with staged(target) as folder:
        serving = folder / SERVING
        serving.mkdir()
        for file in files:
            shutil.copyfile(file, serving / file.name)
        model = load_model(serving)
        control = ChatTokenizer.load(serving).control_ids
        golden = record_golden(model, sample_sequences(model, [control[BOD], control[BOS]]))
        _seal(folder, f"{model_id}@0", parent=None, run_id=None, golden=golden)
    return target


def discard_version(path: Path) -> None:
    """Removes a version that no run committed, or that serves no more; nobody sees half of it."""
    remove_whole(path)


def _save_trainer(folder: Path, tensors: dict[str, Tensor], meta: Mapping[str, object]) -> None:
    folder.mkdir()
    owned = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    save_file(owned, folder / TRAINER_TENSORS)
    (folder / TRAINER_META).write_text(json.dumps(meta, indent=1) + "\n")


def _seal(
    folder: Path,
    weights_version: str,
    *,
    parent: str | None,
    run_id: str | None,
    golden: tuple[Golden, ...],
) -> None:
    serving = folder / SERVING
    tensors: dict[str, str] = {}
    for file in weight_files(serving):
        tensors |= tensor_digests(file)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    Manifest(
        weights_version=weights_version,
        parent=parent,
        run_id=run_id,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        tensors=tensors,
        files={file.relative_to(folder).as_posix(): _record(file) for file in files},
        config_digest=file_sha256(serving / CONFIG_FILE),
        tokenizer_digest=file_sha256(serving / TOKENIZER_FILE),
        template_digest=template_digest(),
        golden=golden,
    ).sealed().write(folder)


def _record(file: Path) -> FileRecord:
    has_tensor_digests = file.parent.name == SERVING and file.suffix == ".safetensors"
    return FileRecord(
        num_bytes=file.stat().st_size, sha256="" if has_tensor_digests else file_sha256(file)
    )


def _model_files(model_dir: Path) -> list[Path]:
    files = [model_dir / CONFIG_FILE, model_dir / TOKENIZER_FILE, *weight_files(model_dir)]
    if (model_dir / INDEX_FILE).exists():
        files.append(model_dir / INDEX_FILE)
    if missing := [str(file) for file in files if not file.is_file()]:
        raise WeightsError(
            f"a model directory holds {CONFIG_FILE}, {TOKENIZER_FILE} and safetensors; "
            f"missing are {missing}"
        )
    return files


def _check_same(target: Path, files: Sequence[Path]) -> None:
    manifest = read_manifest(target)
    tensors: dict[str, str] = {}
    for file in files:
        record = manifest.files_in(SERVING).get(file.name)
        if file.suffix == ".safetensors":
            tensors |= tensor_digests(file)
        elif record is None or record.sha256 != file_sha256(file):
            raise _imported_another(target, file.name)
    if tensors != manifest.tensors:
        raise _imported_another(target, "its weights")


def _imported_another(target: Path, what: str) -> WeightsError:
    return WeightsError(
        f"{target} was imported from another model: {what} differs; "
        "give the new model another model_id, or start with an empty home"
    )
