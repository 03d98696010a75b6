from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from m1serve.errors import WeightsError
from m1serve.model.config import M1Config
from m1serve.model.tiny import tiny_config


def test_a_config_survives_its_json() -> None:
    config = tiny_config(512, eos_token_id=3)
    assert M1Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_minimax_m1s_own_config_is_read(m1_data: Path) -> None:
    config = M1Config.from_dict(json.loads((m1_data / "config.json").read_text()))
    assert config.softmax_layers == tuple(range(7, 80, 8))
    assert len(config.lightning_layers) == 70
    assert (config.rotary_dim, config.head_dim, config.eos_token_id) == (64, 128, None)


def test_text_01_is_the_same_graph() -> None:
    raw = tiny_config().to_dict() | {
        "model_type": "minimax_text_01",
        "architectures": ["MiniMaxText01ForCausalLM"],
    }
    assert M1Config.from_dict(raw) == tiny_config()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', wanted one of"),
        ({"quantization_config": {"bits": 8}}, "quantization_config is {'bits': 8}"),
        ({"eos_token_id": 512}, "eos_token_id 512 is beyond the vocabulary of 512"),
        ({"rope_theta": float("nan")}, "rope_theta is nan, not a usable number"),
        ({"layernorm_mlp_alpha": 10**400}, "layernorm_mlp_alpha is 1000"),
        ({"head_dim": 10**30}, "head_dim is 1000"),
        (
            {"head_dim": None, "hidden_size": 10**400, "partial_rotary_factor": 0.5},
            "hidden_size is 1000",
        ),
        ({"head_dim": 10**400, "partial_rotary_factor": 0.5}, "head_dim is 1000"),
        ({"partial_rotary_factor": 10**400}, "partial_rotary_factor is 1000"),
        ({"attn_type_list": ["full"] * 8}, "not a list of 0 (lightning) and 1 (softmax)"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": [["MiniMaxM1ForCausalLM"]]}, "architectures is [['MiniMaxM1ForCausal"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"shared_intermediate_size": 512}, "shared_intermediate_size is 512"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu' is supported"),
        ({"attn_type_list": [0, 1]}, "attn_type_list has 2 entries for 8 layers"),
        ({"attn_type_list": [0, 0, 0, 0, 0, 0, 0, 2]}, "other values than 0 and 1"),
        ({"num_key_value_heads": 3}, "4 heads do not divide among 3 kv heads"),
        ({"rotary_dim": 32}, "rotary_dim 32 is odd or beyond head_dim 16"),
        ({"num_experts_per_tok": 5}, "top 5 of 4 experts"),
        ({"hidden_size": "64"}, "hidden_size is '64', not a usable number"),
        ({"postnorm": 1}, "postnorm is 1"),
    ],
)
def test_another_architecture_is_refused_by_name(change: dict[str, object], said: str) -> None:
    with pytest.raises(WeightsError) as refusal:
        M1Config.from_dict(tiny_config().to_dict() | change)
    assert said in str(refusal.value)


def test_every_missing_key_is_named() -> None:
    raw = tiny_config().to_dict()
    del raw["postnorm"], raw["rotary_dim"]
    with pytest.raises(WeightsError, match=r"missing keys \['rotary_dim', 'postnorm'\]"):
        M1Config.from_dict(raw)
