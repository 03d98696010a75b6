"""What loading costs in memory, and what it refuses before or while it reads weights."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MiniMaxConfig, MiniMaxForCausalLM

from m1serve.errors import WeightsError
from m1serve.model.checkpoint import load_model, save_model
from m1serve.model.directory import read_config
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.tensor_file import stored_tensors
from m1serve.model.tensor_stream import BUFFER_BYTES, TensorStream
from m1serve.model.tiny import tiny_config, tiny_tokenizer

IDS = torch.arange(40)[None]
MIB = 2**20

MEASURED_LOAD = """
import json, re, sys
from pathlib import Path
import torch
from m1serve.model.checkpoint import load_model

def memory(key):
    return 1024 * int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

load_model(Path(sys.argv[1]))
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
model = load_model(Path(sys.argv[2]))
target = sum(p.numel() * p.element_size() for p in model.parameters())
print(json.dumps({"extra": memory("VmHWM") - before - target, "target": target}))
"""


@pytest.fixture
def saved(model: M1ForCausalLM, tmp_path: Path) -> Path:
    save_model(model, tmp_path / "model", dtype=torch.float32)
    return tmp_path / "model"


def rewrite(path: Path, changes: dict[str, Tensor]) -> None:
    file = path / "model.safetensors"
    tensors = {**load_file(file), **changes}
    save_file({name: t.clone() for name, t in tensors.items()}, file)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("max_shard_bytes", [2**40, 72 * MIB])
def test_a_load_takes_the_model_and_one_buffer(
    saved: Path, tmp_path: Path, max_shard_bytes: int
) -> None:
    """A file of 128 MiB, or shards: mapping it would cost 128 MiB, or a shard, on top."""
    config = replace(tiny_config(2**17), hidden_size=256, num_hidden_layers=1)
    model = M1ForCausalLM(replace(config, attn_type_list=(0,)))
    for parameter in model.parameters():
        parameter.detach().fill_(0.5)
    large = tmp_path / "large"
    save_model(model, large, max_shard_bytes=max_shard_bytes)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED_LOAD, str(saved), str(large)],
        capture_output=True,
        text=True,
        check=True,
    )
    measured = json.loads(done.stdout)
    assert measured["target"] > 250 * MIB
    assert measured["extra"] < BUFFER_BYTES + 16 * MIB


def test_tensors_larger_than_the_buffer_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "t.safetensors"
    t = torch.arange(BUFFER_BYTES // 2 + 3).to(torch.bfloat16)
    save_file({"a": t, "b": t[:7].clone()}, file)
    targets = {"a": torch.zeros_like(t), "b": torch.zeros(7)}
    TensorStream(device="cpu").fill(file, stored_tensors(file), targets)
    assert torch.equal(targets["a"], t)
    assert torch.equal(targets["b"], t[:7].float())


def test_a_file_that_ends_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.safetensors"
    save_file({"a": torch.ones(100)}, file)
    stored = stored_tensors(file)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(WeightsError, match="it ended while it was read"):
        TensorStream(device="cpu").fill(file, stored, {"a": torch.zeros(100)})


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused_by_name(saved: Path, value: float) -> None:
    """In an expert that no golden sequence may ever reach."""
    name = "model.layers.2.block_sparse_moe.experts.3.w2.weight"
    weight = load_file(saved / "model.safetensors")[name]
    weight[5, 7] = value
    rewrite(saved, {name: weight})
    with pytest.raises(WeightsError, match=rf"1 of 4096 values of {name} in .* are NaN or inf"):
        load_model(saved)


def test_weights_too_large_for_the_dtype_are_refused(saved: Path) -> None:
    rewrite(saved, {"model.norm.weight": torch.full((64,), 1e6)})
    load_model(saved)
    with pytest.raises(WeightsError, match=r"64 of 64 values .* infinite in torch\.float16"):
        load_model(saved, dtype=torch.float16)


def test_a_dtype_that_is_no_float_is_refused(saved: Path) -> None:
    rewrite(saved, {"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    with pytest.raises(WeightsError, match=r"norm\.weight has dtype I8, wanted one of"):
        load_model(saved)


def test_an_fp32_router_stays_as_it_is_in_a_bf16_model(
    model: M1ForCausalLM, tmp_path: Path
) -> None:
    """M1's own checkpoints: everything bf16 but the routers, whose last bits choose experts."""
    save_model(model, tmp_path, dtype=torch.bfloat16)
    loaded = load_model(tmp_path, dtype=torch.bfloat16)
    for mine, theirs in zip(loaded.blocks, model.blocks, strict=True):
        stored = theirs.block_sparse_moe.gate.weight
        assert not torch.equal(stored, stored.bfloat16().float())
        assert torch.equal(mine.block_sparse_moe.gate.weight, stored)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_gets_the_same_weights(saved: Path) -> None:
    on_gpu = load_model(saved, device="cuda").state_dict()
    for name, t in load_model(saved).state_dict().items():
        assert torch.equal(on_gpu[name].cpu(), t), name


def test_a_narrow_router_is_used_as_it_is_and_told(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.layers.0.block_sparse_moe.gate.weight"
    narrow = load_file(saved / "model.safetensors")[name].bfloat16()
    rewrite(saved, {name: narrow})
    with caplog.at_level(logging.WARNING):
        gate = load_model(saved, dtype=torch.bfloat16).blocks[0].block_sparse_moe.gate.weight
    assert gate.dtype == torch.float32
    assert torch.equal(gate, narrow.float())
    assert "stores 1 routers narrower than fp32" in caplog.text


def test_several_missing_shards_are_counted(model: M1ForCausalLM, tmp_path: Path) -> None:
    save_model(model, tmp_path, dtype=torch.float32, max_shard_bytes=100_000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    for shard in shards[1:]:
        shard.unlink()
    wanted = f"{len(shards) - 1} of {len(shards)} files are missing in {tmp_path}; fetch them again"
    with pytest.raises(WeightsError, match=wanted):
        load_model(tmp_path)


def test_tensors_must_be_where_the_index_has_them(model: M1ForCausalLM, tmp_path: Path) -> None:
    save_model(model, tmp_path, dtype=torch.float32, max_shard_bytes=100_000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    shutil.copyfile(shards[0], shards[1])
    with pytest.raises(WeightsError, match="the index has it; fetch both again") as refusal:
        load_model(tmp_path)
    said = str(refusal.value)
    assert f"is in ['{shards[0].name}', '{shards[1].name}'], wanted in one of them; fetch" in said
    assert f"is not in {shards[1].name}, where the index has it" in said


def test_a_header_that_lies_about_its_bytes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.safetensors"
    for entry in (
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F7", "shape": [2], "data_offsets": [0, 8]},
    ):
        header = json.dumps({"a": entry}).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
        with pytest.raises(WeightsError, match=r"not safetensors|has dtype F7"):
            stored_tensors(file)


def test_token_ids_that_the_config_leaves_null_come_from_the_tokenizer(saved: Path) -> None:
    assert read_config(saved).eos_token_id is None
    tokenizer = tiny_tokenizer(400)
    raw = json.loads((saved / "config.json").read_text())
    tokenizer.save(str(saved / "tokenizer.json"))
    with pytest.raises(WeightsError, match="wrong tokenizer: it has 400 tokens, the model 128"):
        load_model(saved)
    (saved / "config.json").write_text(json.dumps(raw | {"vocab_size": 448}))
    config = read_config(saved)
    assert config.bos_token_id == tokenizer.token_to_id("<beginning_of_sentence>")
    assert config.eos_token_id == tokenizer.token_to_id("<end_of_sentence>")
    (saved / "config.json").write_text(json.dumps(raw | {"vocab_size": 448, "eos_token_id": 7}))
    with pytest.raises(WeightsError, match=r"eos_token_id 7, but <end_of_sentence> is 2 in"):
        read_config(saved)


@torch.no_grad()
def test_what_transformers_saves_is_the_model_that_transformers_runs(tmp_path: Path) -> None:
    """All channels rotate here: transformers knows no partial rotation for this model."""
    config = MiniMaxConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"] * 2,
        num_local_experts=4,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 1.0,
        },
        full_attn_alpha_factor=2.0,
        linear_attn_alpha_factor=1.5,
        mlp_alpha_factor=1.25,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    theirs = MiniMaxForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.0.self_attn.slope_rate" in names
    wanted = theirs(IDS).logits
    assert (ours(IDS) - wanted).abs().max() < 2e-5 * max(1.0, wanted.abs().max().item())


def test_transformers_names_in_memory_are_explained(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    changed = {name.replace("block_sparse_moe.gate", "mlp.gate"): t for name, t in tensors.items()}
    save_file(changed, saved / "model.safetensors")
    with pytest.raises(WeightsError, match=r"save_pretrained\(save_original_format=True\)"):
        load_model(saved)
