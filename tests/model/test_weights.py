"""Version directories: whole or absent, and every fault of one is named before it serves."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from m1serve.errors import StoreError, WeightsError
from m1serve.model.checkpoint import load_model
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.tensor_file import stored_tensors
from m1serve.model.tiny import tiny_model_dir, tiny_tokenizer
from m1serve.model.weights import (
    Manifest,
    discard_version,
    golden_gap,
    import_model_dir,
    load_trainer,
    load_version,
    read_manifest,
    verify_version,
    version_path,
    write_version,
)

PROMPTS = [list(range(5, 40)), list(range(60, 20, -1))]


def write_next(root: Path, model_dir: Path, model: M1ForCausalLM, **changes: object) -> Path:
    arguments: dict[str, object] = {
        "weights_version": "tiny@1",
        "model": model,
        "tokenizer_file": model_dir / "tokenizer.json",
        "parent": "tiny@0",
        "run_id": "run-1",
        "golden_prompts": PROMPTS,
        "trainer_tensors": {"master.a": torch.ones(3), "rng": torch.get_rng_state()},
        "trainer_meta": {"step": 7, "lr": 5e-5},
        "dtype": torch.float32,
    }
    return write_version(root, **(arguments | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tiny(model_dir: Path) -> M1ForCausalLM:
    return load_model(model_dir)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    root = tmp_path_factory.mktemp("weights")
    return write_next(root, model_dir, load_model(model_dir))


@pytest.fixture
def version(pristine: Path, tmp_path: Path) -> Path:
    """A private copy, to be damaged."""
    return shutil.copytree(pristine, tmp_path / "tiny" / "1")


def test_a_version_says_where_it_came_from(version: Path) -> None:
    manifest = verify_version(version)
    assert (manifest.weights_version, manifest.parent, manifest.run_id) == (
        "tiny@1",
        "tiny@0",
        "run-1",
    )
    assert [g.token_ids for g in manifest.golden] == [tuple(prompt) for prompt in PROMPTS]
    assert [len(g.logprobs) for g in manifest.golden] == [34, 39]
    assert set(manifest.files) == {
        "serving/config.json",
        "serving/model.safetensors",
        "serving/tokenizer.json",
        "trainer/meta.json",
        "trainer/state.safetensors",
    }


def test_golden_logprobs_are_reproduced_to_the_bit(version: Path, tiny: M1ForCausalLM) -> None:
    loaded, manifest = load_version(version)
    assert golden_gap(loaded, manifest) == (0.0, 0.0)
    assert torch.equal(loaded(torch.tensor([PROMPTS[0]])), tiny(torch.tensor([PROMPTS[0]])))


def test_golden_logprobs_are_those_of_the_stored_dtype(
    tmp_path: Path, model_dir: Path, tiny: M1ForCausalLM
) -> None:
    path = write_next(tmp_path, model_dir, tiny, dtype=torch.bfloat16)
    rounded, manifest = load_version(path)
    assert golden_gap(rounded, manifest) == (0.0, 0.0)
    mean, largest = golden_gap(tiny, manifest)
    assert 0 < mean < largest


def test_other_weights_show_in_the_golden_gap(version: Path) -> None:
    loaded, manifest = load_version(version)
    with torch.no_grad():
        loaded.lm_head.weight[7] += 1.0
    mean, largest = golden_gap(loaded, manifest)
    assert 0 < mean < largest
    with torch.no_grad():
        loaded.norm.weight[0] = torch.nan
    assert math.isnan(golden_gap(loaded, manifest)[0])


def test_the_trainer_state_comes_back_as_it_was(version: Path) -> None:
    tensors, meta = load_trainer(version)
    assert torch.equal(tensors["master.a"], torch.ones(3))
    torch.set_rng_state(tensors["rng"])
    assert meta == {"step": 7, "lr": 5e-5}


def test_damaged_or_absent_trainer_state_is_refused(
    version: Path, tmp_path: Path, model_dir: Path, tiny: M1ForCausalLM
) -> None:
    flip_a_bit(version / "trainer" / "state.safetensors")
    with pytest.raises(WeightsError, match=r"state\.safetensors is damaged"):
        load_trainer(version)
    verify_version(version)
    (version / "trainer" / "state.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"state\.safetensors is missing"):
        load_trainer(version)
    bare = write_next(tmp_path, model_dir, tiny, weights_version="tiny@2", trainer_tensors=None)
    with pytest.raises(WeightsError, match="without trainer state; start from its serving weights"):
        load_trainer(bare)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def reseal(version: Path, change: Callable[[Manifest], Manifest]) -> None:
    """An attacker's or a bug's consistent manifest."""
    change(read_manifest(version)).sealed().write(version)


def drop_a_tensor(version: Path) -> None:
    """From file and sizes alike: only the tensor list knows."""
    file = version / "serving" / "model.safetensors"
    tensors = {name: t.clone() for name, t in load_file(file).items()}
    del tensors["lm_head.weight"]
    save_file(tensors, file)

    def resize(manifest: Manifest) -> Manifest:
        record = replace(manifest.files["serving/model.safetensors"], num_bytes=file.stat().st_size)
        return replace(manifest, files={**manifest.files, "serving/model.safetensors": record})

    reseal(version, resize)


def take_another_architecture(version: Path) -> None:
    file = version / "serving" / "config.json"
    file.write_text(file.read_text().replace('"hidden_size": 64', '"hidden_size": 32'))


def take_another_tokenizer(version: Path) -> None:
    tiny_tokenizer(400).save(str(version / "serving" / "tokenizer.json"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda v: flip_a_bit(v / "serving/model.safetensors"),
            "has other bytes than were written",
        ),
        (lambda v: truncate(v / "serving/model.safetensors"), "model.safetensors is truncated"),
        (lambda v: (v / "serving/model.safetensors").unlink(), "files are missing: ['model.safe"),
        (lambda v: (v / "serving/pickle.bin").write_bytes(b"x"), "does not know: ['pickle.bin']"),
        (drop_a_tensor, "tensor lm_head.weight is missing"),
        (take_another_architecture, "config.json was changed: it describes another architecture"),
        (take_another_tokenizer, "tokenizer.json is the wrong tokenizer"),
        (lambda v: truncate(v / "serving/manifest.json"), "manifest.json is damaged"),
        (lambda v: (v / "serving/manifest.json").write_text("[]"), "manifest.json is damaged"),
        (lambda v: (v / "serving/manifest.json").unlink(), "not a version directory, or not a"),
    ],
)
def test_every_fault_is_named(version: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(version)
    with pytest.raises(WeightsError) as refusal:
        verify_version(version)
    assert said in str(refusal.value)
    with pytest.raises(WeightsError):
        load_version(version)


def test_a_refusal_says_what_to_do(version: Path) -> None:
    flip_a_bit(version / "serving" / "model.safetensors")
    with pytest.raises(
        WeightsError, match="Restore the directory from a copy, or serve its parent"
    ):
        verify_version(version)


def test_an_edited_manifest_is_noticed(version: Path) -> None:
    manifest = read_manifest(version)
    replace(manifest, parent="tiny@7").write(version)
    with pytest.raises(WeightsError, match="was changed after it was written"):
        verify_version(version)


def test_shapes_are_checked_against_the_architecture_even_under_a_consistent_manifest(
    version: Path,
) -> None:
    take_another_architecture(version)

    def forget(manifest: Manifest) -> Manifest:
        record = replace(manifest.files["serving/config.json"], sha256="")
        return replace(manifest, files={**manifest.files, "serving/config.json": record})

    reseal(version, forget)
    with pytest.raises(WeightsError, match=r"is \[512, 64\], the architecture of .* \[512, 32\]"):
        verify_version(version)


def test_the_wanted_version_is_checked_too(version: Path) -> None:
    assert verify_version(version, weights_version="tiny@1")
    with pytest.raises(WeightsError, match="holds tiny@1, wanted tiny@2"):
        load_version(version, weights_version="tiny@2")


def test_a_version_is_never_overwritten(
    tmp_path: Path, model_dir: Path, tiny: M1ForCausalLM
) -> None:
    path = write_next(tmp_path, model_dir, tiny)
    before = (path / "serving" / "manifest.json").read_bytes()
    with pytest.raises(StoreError, match="exists; versions are never overwritten"):
        write_next(tmp_path, model_dir, tiny)
    assert (path / "serving" / "manifest.json").read_bytes() == before
    discard_version(path)
    assert list(path.parent.iterdir()) == []
    assert write_next(tmp_path, model_dir, tiny) == path


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(
    tmp_path: Path, model_dir: Path, model: M1ForCausalLM
) -> None:
    with pytest.raises(WeightsError, match=r"wrong tokenizer: it has \d+ tokens, the model 128"):
        write_next(tmp_path, model_dir, model)
    assert list(tmp_path.iterdir()) == []


def test_diverged_weights_are_not_written(tmp_path: Path, model_dir: Path) -> None:
    model = load_model(model_dir)
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    with pytest.raises(WeightsError, match=r"1 of 64 values of model\.norm\.weight .* are NaN"):
        write_next(tmp_path, model_dir, model)
    with torch.no_grad():
        model.norm.weight.fill_(3e38)
    with pytest.raises(WeightsError, match="logprobs are not finite"):
        write_next(tmp_path, model_dir, model)
    assert list((tmp_path / "tiny").iterdir()) == []


@pytest.mark.parametrize("max_file_bytes", [1_000_000, 10_000])
def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, model_dir: Path, tiny: M1ForCausalLM, max_file_bytes: int
) -> None:
    """A file size limit stands in for the full disk: the same write fails half-way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, before[1]))
    try:
        with pytest.raises(StoreError, match=r"could not write .*MiB are free there and nothing"):
            write_next(tmp_path, model_dir, tiny)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "tiny").iterdir()) == []


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from m1serve.model.staging import staged
with staged(Path(sys.argv[1]) / "tiny" / "1") as folder:
    (folder / "half").write_text("half a version")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_no_version_and_the_next_one_cleans_up(
    tmp_path: Path, model_dir: Path, tiny: M1ForCausalLM
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not version_path(tmp_path, "tiny@1").exists()
    assert len(os.listdir(tmp_path / "tiny")) == 1
    write_next(tmp_path, model_dir, tiny)
    assert os.listdir(tmp_path / "tiny") == ["1"]


def test_version_names_that_would_leave_the_root_are_refused(tmp_path: Path) -> None:
    assert version_path(tmp_path, "nano.v2@13") == tmp_path / "nano.v2" / "13"
    for name in ("nano", "nano@", "nano@01", "../x@1", "a/b@1", "@1", "nano@-1", "nano@1/.."):
        with pytest.raises(WeightsError, match="is no weights version"):
            version_path(tmp_path, name)


def test_a_plain_model_becomes_version_zero_byte_for_byte(tmp_path: Path, model_dir: Path) -> None:
    path = import_model_dir(tmp_path, model_id="tiny", model_dir=model_dir)
    assert path == tmp_path / "tiny" / "0"
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (path / "serving" / name).read_bytes() == (model_dir / name).read_bytes()
    model, manifest = load_version(path, weights_version="tiny@0")
    assert manifest.parent is None
    assert len(manifest.golden) == 4
    assert golden_gap(model, manifest) == (0.0, 0.0)


def test_importing_twice_is_a_no_op_and_another_model_is_refused(
    tmp_path: Path, model_dir: Path
) -> None:
    path = import_model_dir(tmp_path, model_id="tiny", model_dir=model_dir)
    manifest = read_manifest(path)
    assert import_model_dir(tmp_path, model_id="tiny", model_dir=model_dir) == path
    assert read_manifest(path) == manifest
    other = tiny_model_dir(tmp_path / "other", seed=9)
    with pytest.raises(WeightsError, match="imported from another model: its weights differ"):
        import_model_dir(tmp_path, model_id="tiny", model_dir=other)


def test_an_incomplete_model_directory_is_refused(tmp_path: Path, model_dir: Path) -> None:
    partial = shutil.copytree(model_dir, tmp_path / "partial")
    (partial / "tokenizer.json").unlink()
    with pytest.raises(WeightsError, match=r"missing are .*tokenizer\.json"):
        import_model_dir(tmp_path, model_id="tiny", model_dir=partial)


def test_a_truncated_file_is_named_where_it_lies(tmp_path: Path, model_dir: Path) -> None:
    cut = shutil.copytree(model_dir, tmp_path / "cut")
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=f"^{file} is truncated"):
        import_model_dir(tmp_path / "weights", model_id="tiny", model_dir=cut)


def test_a_manifest_is_plain_json_without_pickle(version: Path) -> None:
    raw = json.loads((version / "serving" / "manifest.json").read_text())
    assert raw.keys() == asdict(read_manifest(version)).keys()
    suffixes = {path.suffix for path in version.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors"}


def test_a_header_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes((2**60).to_bytes(8, "little") + b"{}")
    with pytest.raises(WeightsError, match="truncated or not safetensors"):
        stored_tensors(file)
    file.write_bytes(b"")
    with pytest.raises(WeightsError, match="truncated or not safetensors"):
        stored_tensors(file)
    with pytest.raises(WeightsError, match=r"gone\.safetensors is missing"):
        stored_tensors(tmp_path / "gone.safetensors")
