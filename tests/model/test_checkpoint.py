from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from m1serve.errors import ConfigError, WeightsError
from m1serve.model.checkpoint import disk_views, empty_model, load_model, save_model
from m1serve.model.config import M1Config
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.tiny import random_model, tiny_model_dir, tiny_tokenizer

IDS = torch.arange(40)[None]


@pytest.fixture
def saved(model: M1ForCausalLM, tmp_path: Path) -> Path:
    save_model(model, tmp_path / "model", dtype=torch.float32)
    return tmp_path / "model"


def rewrite(path: Path, changes: Mapping[str, Tensor | None]) -> None:
    """Replaces, adds or (None) removes tensors of model.safetensors."""
    file = path / "model.safetensors"
    tensors = {**load_file(file), **changes}
    save_file({name: t.clone() for name, t in tensors.items() if t is not None}, file)


def test_fp32_masters_survive_a_roundtrip_to_the_bit(model: M1ForCausalLM, saved: Path) -> None:
    loaded = load_model(saved)
    for name, t in model.state_dict().items():
        assert torch.equal(t, loaded.state_dict()[name]), name
    assert torch.equal(loaded(IDS), model(IDS))
    assert not loaded.training


def test_the_names_on_disk_are_minimax_m1s(m1_data: Path) -> None:
    names = json.loads((m1_data / "model.safetensors.index.json").read_text())["weight_map"]
    config = M1Config.from_dict(json.loads((m1_data / "config.json").read_text()))
    views = disk_views(empty_model(config, device="meta", dtype=torch.bfloat16))
    assert views.keys() == names.keys()
    assert sum(view.numel() for view in views.values()) == 456_089_655_296


def test_shards_and_one_file_hold_the_same_model(model: M1ForCausalLM, tmp_path: Path) -> None:
    save_model(model, tmp_path, dtype=torch.float32, max_shard_bytes=100_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 5
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in model.parameters())
    assert torch.equal(load_model(tmp_path)(IDS), model(IDS))


def test_a_narrower_dtype_spares_the_router(model: M1ForCausalLM, tmp_path: Path) -> None:
    save_model(model, tmp_path, dtype=torch.bfloat16)
    for name, t in load_file(tmp_path / "model.safetensors").items():
        is_router = name.endswith("block_sparse_moe.gate.weight")
        assert t.dtype == (torch.float32 if is_router else torch.bfloat16), name
    loaded = load_model(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert (loaded(IDS) - model(IDS)).abs().mean() < 0.1


def test_a_model_loads_in_another_dtype(saved: Path) -> None:
    loaded = load_model(saved, dtype=torch.bfloat16)
    assert loaded.blocks[0].block_sparse_moe.gate.weight.dtype == torch.float32
    assert loaded.blocks[0].block_sparse_moe.w2_XEF.dtype == torch.bfloat16
    assert loaded(IDS).isfinite().all()


def test_derived_buffers_of_other_exporters_are_ignored(saved: Path) -> None:
    before = load_model(saved)(IDS)
    start = "model.layers.0.self_attn."
    names = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    rewrite(saved, {start + name: torch.full((4, 1, 1), 9.0) for name in names})
    assert torch.equal(load_model(saved)(IDS), before)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lm_head.weight": None}, "missing lm_head.weight"),
        ({"model.layers.0.extra": torch.ones(1)}, "unexpected model.layers.0.extra"),
        ({"lm_head.weight": torch.ones(64, 64)}, "lm_head.weight is [64, 64], wanted [128, 64]"),
    ],
)
def test_wrong_tensors_are_refused_by_name(
    saved: Path, changes: dict[str, Tensor | None], said: str
) -> None:
    rewrite(saved, changes)
    with pytest.raises(WeightsError) as refusal:
        load_model(saved)
    assert f"{said}; fetch config.json and weights from one checkpoint" in str(refusal.value)


def test_unusable_files_are_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"cannot read .*is it a model directory"):
        load_model(tmp_path / "nowhere")
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="is truncated: "):
        load_model(saved)
    file.unlink()
    with pytest.raises(WeightsError, match=r"model\.safetensors is missing; fetch it again"):
        load_model(saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(WeightsError, match="is not JSON"):
        load_model(saved)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ('{"weight_map": {"lm_head.weight": "../other.safetensors"}}', "outside its directory"),
        ('{"weight_map": {"lm_head.weight": "gone.safetensors"}}', "gone.safetensors is missing"),
        ("[]", "is not a safetensors index"),
    ],
)
def test_a_bad_index_is_refused(saved: Path, index: str, said: str) -> None:
    (saved / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match=said):
        load_model(saved)


def test_the_tiny_model_is_a_whole_model_directory(model_dir: Path, tmp_path: Path) -> None:
    model = load_model(model_dir)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    assert model.config.eos_token_id == tokenizer.token_to_id("<end_of_sentence>")
    assert model.config.vocab_size % 64 == 0
    assert model.config.vocab_size >= tokenizer.get_vocab_size()
    other = tiny_model_dir(
        tmp_path / "b", seed=1, tokenizer_file=shutil.copy(model_dir / "tokenizer.json", tmp_path)
    )
    assert not torch.equal(load_model(other)(IDS), model(IDS))


def test_the_tiny_tokenizer_knows_the_chat_tokens_and_keeps_tags_in_text() -> None:
    tokenizer = tiny_tokenizer()
    text = '<think>\né 42\n</think>\n<tool_calls>\n{"name": "get_order"}\n</tool_calls>'
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert ids[0] == tokenizer.token_to_id("<think>")
    assert tokenizer.decode(tokenizer.encode("<end_of_sentence>x").ids) == "x"


def test_the_tiny_model_needs_the_chat_tokens(tmp_path: Path) -> None:
    raw = json.loads(tiny_tokenizer().to_str())
    raw["added_tokens"], raw["model"]["vocab"] = [], {"a": 0}
    raw["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="has no <beginning_of_sentence>"):
        tiny_model_dir(tmp_path / "m", tokenizer_file=tmp_path / "tokenizer.json")


def test_random_weights_follow_their_seed(config: M1Config) -> None:
    same = [random_model(config, seed=seed)(IDS) for seed in (3, 3, 4)]
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])


def test_a_directory_written_again_holds_the_last_model(
    model: M1ForCausalLM, tmp_path: Path
) -> None:
    save_model(model, tmp_path, dtype=torch.float32, max_shard_bytes=100_000)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    save_model(model, tmp_path, dtype=torch.float32)
    assert not load_model(tmp_path).lm_head.weight.any()
