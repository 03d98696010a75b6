"""`m1serve doctor --model DIR`: every fault of a directory is named without loading it."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from m1serve.cli.app import app
from m1serve.cli.doctor_model import examine_model
from m1serve.cli.finding import Finding
from m1serve.config import Settings
from m1serve.engine.launch import serving_dtype
from m1serve.errors import WeightsError
from m1serve.model.checkpoint import load_model, save_model, wanted_shapes
from m1serve.model.devices import Device
from m1serve.model.directory import read_config
from m1serve.model.footprint import footprint
from m1serve.model.weights import import_model_dir
from m1serve.types import VersionRef

NANO = Settings().model_dir
GIB = 2**30
CPU = Device(name="cpu", model="x86_64", free_bytes=20 * GIB, total_bytes=32 * GIB)
H200 = tuple(
    Device(
        name=f"cuda:{i}", model="NVIDIA H200", free_bytes=140 * 10**9 + i, total_bytes=141 * 10**9
    )
    for i in range(8)
)
SUBJECTS = {
    "model",
    "model files",
    "model tensors",
    "model tokenizer",
    "model template",
    "memory",
}


def examined(path: Path, devices: tuple[Device, ...] = (CPU,)) -> dict[str, Finding]:
    findings = {finding.subject: finding for finding in examine_model(path, devices)}
    assert findings.keys() == SUBJECTS
    return findings


def wrong(findings: dict[str, Finding]) -> set[str]:
    return {subject for subject, finding in findings.items() if not finding.is_good}


@pytest.fixture
def nano(tmp_path: Path) -> Path:
    return shutil.copytree(NANO, tmp_path / "nano")


@pytest.fixture(scope="module")
def m1_shards(m1_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All 413 files of MiniMax-M1 with true headers and sizes, and holes where the weights are."""
    path = tmp_path_factory.mktemp("m1")
    for name in ("config.json", "tokenizer_config.json", "model.safetensors.index.json"):
        shutil.copyfile(m1_data / name, path / name)
    weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    shapes = wanted_shapes(read_config(path))
    for file in set(weight_map.values()):
        names = [name for name in weight_map if weight_map[name] == file]
        _write_holes(path / file, {name: shapes[name] for name in names})
    return path


def _write_holes(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, place = {}, 0
    for name, shape in shapes.items():
        is_router = name.endswith("block_sparse_moe.gate.weight")
        end = place + math.prod(shape) * (4 if is_router else 2)
        dtype = "F32" if is_router else "BF16"
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(header_of(text))
        stream.truncate(8 + len(text) + place)


def test_the_shipped_model_is_good() -> None:
    findings = examined(NANO)
    assert wrong(findings) == set()
    assert findings["model tensors"].details["dtypes"] == {"BF16": 147, "F32": 8}
    fits = findings["memory"].details["fit"]
    assert isinstance(fits, dict)
    assert fits["longest_context_tokens"] == load_model(NANO).config.max_position_embeddings


def test_all_of_m1_is_read_by_its_headers(m1_shards: Path) -> None:
    findings = examined(m1_shards, H200)
    assert wrong(findings) == {"model tokenizer", "memory"}
    assert findings["model files"].text == "413 files, 849.6 GiB, none truncated"
    assert findings["model files"].details["num_bytes"] == 912_210_767_872
    assert findings["model tensors"].details["num_tensors"] == 8_243
    assert findings["model tensors"].details["dtypes"] == {"BF16": 8_163, "F32": 80}
    assert findings["model template"].text == "renders what m1serve renders"
    assert "no such file" in findings["model tokenizer"].text.lower()


def test_what_m1_needs_is_counted_for_one_device_and_for_all(m1_shards: Path) -> None:
    memory = examined(m1_shards, H200)["memory"]
    assert "cuda:7 (NVIDIA H200) has 130.4 GiB free" in memory.text
    assert "does not fit; all 8 devices, if they shared" in memory.text
    together = memory.details["fit_of_all_devices"]
    assert isinstance(together, dict)
    assert 2.8e6 < together["longest_context_tokens"] < 3.0e6
    one = examined(m1_shards, H200[:1])["memory"].text
    assert "8 such devices, otherwise empty, would do for one context of 8,192" in one
    assert "if they shared it (tensor parallel)" in one
    on_cpu = examined(m1_shards)["memory"].text
    assert "1,847.8 GiB free would do for one context of 8,192" in on_cpu


def test_a_device_that_others_have_filled_is_told_from_one_that_is_too_small(nano: Path) -> None:
    full = replace(H200[0], free_bytes=2**20)
    memory = examined(nano, (full,))["memory"]
    assert not memory.is_good
    assert memory.text.endswith(
        "does not fit; 1 such device, otherwise empty, would do for one context of 8,192"
    )


def test_an_index_without_its_files_is_checked_as_far_as_it_goes(m1_data: Path) -> None:
    findings = examined(m1_data)
    assert "413 of 413 files are missing" in findings["model files"].text
    missing = findings["model files"].details["missing"]
    assert isinstance(missing, list)
    assert (len(missing), missing[412]) == (413, "model-00412-of-00413.safetensors")
    assert findings["model tensors"].is_good
    assert "shapes and dtypes of 8,243 unknown" in findings["model tensors"].text


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def edit_config(path: Path, **changes: object) -> None:
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | changes))


def edit_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    tensors = {**load_file(path / "model.safetensors"), **changes}
    kept = {name: t.clone() for name, t in tensors.items() if t is not None}
    save_file(kept, path / "model.safetensors")


def add_a_token(path: Path) -> None:
    raw = json.loads((path / "tokenizer.json").read_text())
    raw["added_tokens"].append({**raw["added_tokens"][-1], "id": 5000, "content": "<more>"})
    (path / "tokenizer.json").write_text(json.dumps(raw))


def edit_tokenizer(path: Path, **changes: object) -> None:
    raw = json.loads((path / "tokenizer.json").read_text())
    raw["model"] |= changes
    (path / "tokenizer.json").write_text(json.dumps(raw))


def leave_the_files_without_an_index(path: Path) -> None:
    (path / "model.safetensors").rename(path / "model-00000-of-00002.safetensors")


def header_of(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def write_template(path: Path) -> None:
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}")


@pytest.mark.parametrize(
    ("damage", "subject", "said"),
    [
        (truncate, "model files", "model.safetensors is truncated: "),
        (lambda p: (p / "model.safetensors").unlink(), "model files", "model.safetensors is miss"),
        (leave_the_files_without_an_index, "model files", "neither model.safetensors nor"),
        (
            lambda p: (p / "model.safetensors.index.json").write_text("{}"),
            "model files",
            "is not a safetensors index",
        ),
        (
            lambda p: edit_tensors(p, **{"lm_head.weight": torch.ones(7, 192)}),
            "model tensors",
            "lm_head.weight is [7, 192], wanted [1280, 192]",
        ),
        (
            lambda p: edit_tensors(p, **{"lm_head.weight": None, "head": torch.ones(1)}),
            "model tensors",
            "unexpected head; missing lm_head.weight; fetch config.json and weights from one",
        ),
        (
            lambda p: edit_tensors(p, **{"model.norm.weight": torch.ones(192).to(torch.int8)}),
            "model tensors",
            "model.norm.weight has dtype I8",
        ),
        (lambda p: edit_config(p, hidden_act="gelu"), "model", "hidden_act is 'gelu'"),
        (lambda p: edit_config(p, mlp_alpha_factor=1), "model", "mlp_alpha_factor is 1: one of"),
        (lambda p: (p / "config.json").unlink(), "model", "is it a model directory?"),
        (add_a_token, "model tokenizer", "it has 5001 tokens, the model 1280"),
        (lambda p: edit_config(p, eos_token_id=7), "model tokenizer", "says eos_token_id 7, but"),
        (lambda p: (p / "tokenizer.json").write_text("[]"), "model tokenizer", "no tokenizer.json"),
        (lambda p: (p / "tokenizer.json").unlink(), "model tokenizer", "cannot read"),
        (write_template, "model template", "it renders 'user' where m1serve renders"),
        (
            lambda p: (p / "tokenizer_config.json").write_text('{"chat_template": 3}'),
            "model template",
            "is 3, wanted a text",
        ),
        (
            lambda p: (p / "tokenizer_config.json").write_text('{"chat_template": ["x"]}'),
            "model template",
            "wanted a text",
        ),
        (
            lambda p: (p / "chat_template.jinja").write_bytes(b"\xff\xfe"),
            "model template",
            "is not UTF-8",
        ),
        (lambda p: (p / "chat_template.jinja").mkdir(), "model template", "cannot read"),
        (
            lambda p: (p / "chat_template.jinja").write_text("{{ 1 / 0 }}"),
            "model template",
            "it cannot be rendered (ZeroDivisionError",
        ),
        (
            lambda p: edit_tokenizer(p, merges=[["q", "zz"]]),
            "model tokenizer",
            "tokenizer.json cannot be used: Token `",
        ),
        (
            lambda p: edit_tokenizer(p, type="Unigram"),
            "model tokenizer",
            "is not a byte-level BPE",
        ),
        (lambda p: (p / "config.json").write_text("[" * 100_000), "model", "is not JSON"),
        (
            lambda p: (p / "model.safetensors").write_bytes(header_of(b"[" * 100_000)),
            "model files",
            "is truncated or not safetensors",
        ),
        (
            lambda p: (p / "model.safetensors.index.json").write_text("[" * 100_000),
            "model files",
            "is not a safetensors index",
        ),
    ],
)
def test_a_fault_is_named_under_its_subject(
    nano: Path, damage: Callable[[Path], object], subject: str, said: str
) -> None:
    damage(nano)
    findings = examined(nano)
    assert subject in wrong(findings)
    assert said in findings[subject].text


def test_a_cast_router_is_told_and_is_no_fault(nano: Path) -> None:
    name = "model.layers.0.block_sparse_moe.gate.weight"
    edit_tensors(nano, **{name: load_file(nano / "model.safetensors")[name].bfloat16()})
    tensors = examined(nano)["model tensors"]
    assert tensors.is_good
    assert "1 routers are not fp32 as MiniMax's: this is a cast copy" in tensors.text


def test_a_tokenizer_that_ends_sentences_elsewhere_is_not_m1s(m1_shards: Path) -> None:
    shutil.copyfile(NANO / "tokenizer.json", m1_shards / "tokenizer.json")
    try:
        tokenizer = examined(m1_shards)["model tokenizer"]
    finally:
        (m1_shards / "tokenizer.json").unlink()
    assert "<end_of_sentence> is 2, in MiniMax-M1 it is 200020" in tokenizer.text


def test_on_a_gpu_weights_take_what_they_take_on_disk(nano: Path) -> None:
    memory = examined(nano, H200[:1])["memory"]
    counted = memory.details["footprint"]
    assert isinstance(counted, dict)
    files = examined(nano)["model files"].details
    assert counted["weight_bytes"] == files["num_bytes"]
    save_model(load_model(nano), nano, dtype=torch.float32)
    counted = examined(nano, H200[:1])["memory"].details["footprint"]
    assert isinstance(counted, dict)
    assert counted["weight_bytes"] == 4 * counted["num_params"]


@pytest.mark.parametrize(
    ("stored", "itemsize"), [(torch.float16, 4), (torch.float32, 4), (torch.bfloat16, 2)]
)
def test_weights_are_counted_in_the_dtype_that_the_engine_loads_them_in(
    nano: Path, stored: torch.dtype, itemsize: int
) -> None:
    save_model(load_model(nano), nano, dtype=stored)
    # a cast copy: its routers would decide otherwise
    tensors = {name: t.to(stored) for name, t in load_file(nano / "model.safetensors").items()}
    save_file(tensors, nano / "model.safetensors")
    shutil.copytree(nano, nano / "serving")
    version = VersionRef(weights_version="nano@0", path=str(nano))
    assert serving_dtype("auto", version, device="cuda").itemsize == itemsize
    memory = examined(nano, H200[:1])["memory"]
    counted = memory.details["footprint"]
    assert isinstance(counted, dict)
    assert counted == asdict(
        footprint(read_config(nano), weight_itemsize=itemsize, kv_itemsize=itemsize)
    )
    assert ("in fp32" in memory.text) == (itemsize == 4)


def test_no_directory_is_one_finding(tmp_path: Path) -> None:
    (finding,) = examine_model(tmp_path / "gone", (CPU,))
    assert not finding.is_good
    assert "gone is no directory" in finding.text


def test_a_model_larger_than_memory_is_refused_before_a_byte_is_taken(
    m1_shards: Path, tmp_path: Path
) -> None:
    shutil.copyfile(NANO / "tokenizer.json", m1_shards / "tokenizer.json")
    try:
        with pytest.raises(WeightsError, match=r"take 1,699\.1 GiB in torch\.float32, cpu has"):
            load_model(m1_shards)
        with pytest.raises(WeightsError, match=r"take 1,699\.1 GiB in torch\.float32, cpu has"):
            import_model_dir(tmp_path / "weights", model_id="m1", model_dir=m1_shards)
    finally:
        (m1_shards / "tokenizer.json").unlink()
    assert not (tmp_path / "weights").exists()


def test_the_command_looks_at_the_directory_alone_and_says_so_in_json(nano: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--json", "--model", str(nano)])
    assert done.exit_code == 0, done.output
    subjects = [finding["subject"] for finding in json.loads(done.stdout)]
    assert set(subjects) == SUBJECTS | {"python", "packages"}
    truncate(nano)
    done = CliRunner().invoke(app, ["doctor", "--model", str(nano)])
    assert done.exit_code == 1
    assert "wrong model files:" in done.stdout
