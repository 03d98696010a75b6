"""Whatever stands in the files of a model directory, the answer is a value or a WeightsError."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import ones

from m1serve.cli.doctor_model import examine_model
from m1serve.errors import WeightsError
from m1serve.model.config import M1Config
from m1serve.model.devices import Device
from m1serve.model.inventory import take_inventory
from m1serve.model.tensor_file import stored_tensors
from m1serve.model.tiny import tiny_config, tiny_tokenizer
from m1serve.model.token_ids import read_token_ids

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
KEYS = (
    *tiny_config().to_dict(),
    "layer_types",
    "mlp_alpha_factor",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "quantization_config",
)


@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3), st.sets(st.sampled_from(KEYS)))
@settings(deadline=None)
def test_any_config_is_read_or_refused(changes: dict[str, object], dropped: set[str]) -> None:
    for model_type in ("minimax_m1", "minimax"):
        raw = {**tiny_config().to_dict(), "model_type": model_type, **changes}
        kept = {key: value for key, value in raw.items() if key not in dropped}
        try:
            config = M1Config.from_dict(kept)
        except WeightsError:
            continue
        assert M1Config.from_dict(config.to_dict()) == config


def replaced(value: object, path: list[int], new: object) -> object:
    """`value` with the member that `path` leads to exchanged."""
    if not path or not isinstance(value, dict | list) or not value:
        return new
    changed = deepcopy(value)
    key = (
        list(changed)[path[0] % len(changed)]
        if isinstance(changed, dict)
        else path[0] % len(changed)
    )
    changed[key] = replaced(changed[key], path[1:], new)  # type: ignore[index, call-overload]
    return changed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutated")


@given(st.lists(st.integers(0, 99), max_size=4), JSON)
@settings(deadline=None)
def test_any_tokenizer_json_is_read_or_refused(folder: Path, path: list[int], new: object) -> None:
    raw = json.loads(tiny_tokenizer(300).to_str())
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(replaced(raw, path, new)))
    try:
        assert read_token_ids(file).num_tokens >= 0
    except WeightsError:
        return


@given(st.lists(st.integers(0, 99), max_size=4), JSON, st.integers(-9, 9))
@settings(deadline=None)
def test_any_header_is_read_or_refused(
    folder: Path, path: list[int], new: object, more_bytes: int
) -> None:
    file = folder / "t.safetensors"
    save_file({"a": ones(3), "b": ones(2, 2)}, file)
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.dumps(replaced(json.loads(content[8 : 8 + size]), path, new)).encode()
    length = max(0, len(header) + more_bytes)
    file.write_bytes(length.to_bytes(8, "little") + header + content[8 + size :])
    try:
        for tensor in stored_tensors(file).values():
            assert 8 <= tensor.start <= tensor.end <= file.stat().st_size
    except WeightsError:
        return


@given(JSON, st.sampled_from(["index", "tokenizer_config", "config"]))
@settings(max_examples=50, deadline=None)
def test_the_doctor_survives_any_file(folder: Path, new: object, which: str) -> None:
    """Finding by finding, whatever one of the files holds."""
    path = folder / which
    path.mkdir(exist_ok=True)
    names = {
        "index": "model.safetensors.index.json",
        "tokenizer_config": "tokenizer_config.json",
        "config": "config.json",
    }
    (path / "config.json").write_text(json.dumps(tiny_config().to_dict()))
    content = {"weight_map": new} if which == "index" else {"chat_template": new}
    (path / names[which]).write_text(json.dumps(new if which == "config" else content))
    cpu = Device(name="cpu", model="x86_64", free_bytes=2**30, total_bytes=2**30)
    assert len(list(examine_model(path, (cpu,)))) == 6
    try:
        take_inventory(path)
    except WeightsError:
        return
