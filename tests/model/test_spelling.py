"""Two spellings of one config: both are read, a mixture must agree, nothing is guessed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import MiniMaxConfig

from m1serve.errors import WeightsError
from m1serve.model.config import M1Config
from m1serve.model.tiny import tiny_config

ALPHA = 3.5565588200778455
TRANSLATED = (
    "attn_type_list",
    "rope_theta",
    "layernorm_full_attention_alpha",
    "layernorm_full_attention_beta",
    "layernorm_linear_attention_alpha",
    "layernorm_linear_attention_beta",
    "layernorm_mlp_alpha",
    "layernorm_mlp_beta",
    "postnorm",
)


def hf_spelling(**changes: object) -> dict[str, object]:
    """`tiny_config` as the -hf repositories spell it: other names, all else the same."""
    raw = {key: value for key, value in tiny_config().to_dict().items() if key not in TRANSLATED}
    return {
        **raw,
        "model_type": "minimax",
        "architectures": ["MiniMaxForCausalLM"],
        "layer_types": ["linear_attention"] * 7 + ["full_attention"],
        "full_attn_alpha_factor": 2.0,
        "full_attn_beta_factor": 1.0,
        "linear_attn_alpha_factor": 2.0,
        "linear_attn_beta_factor": 1.0,
        "mlp_alpha_factor": 2.0,
        "mlp_beta_factor": 1.0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
        },
        **changes,
    }


def without(raw: dict[str, object], *keys: str) -> dict[str, object]:
    return {key: value for key, value in raw.items() if key not in keys}


def test_the_hf_spelling_is_the_same_model() -> None:
    assert M1Config.from_dict(hf_spelling()) == tiny_config()


def test_earlier_transformers_wrote_rope_at_the_top() -> None:
    raw = without(hf_spelling(rope_theta=10_000.0), "rope_parameters")
    assert M1Config.from_dict(raw) == tiny_config()
    raw = without(hf_spelling(), "rotary_dim")
    assert M1Config.from_dict(raw) == tiny_config()


def test_both_spellings_at_once_are_read_when_they_agree() -> None:
    assert M1Config.from_dict(hf_spelling() | tiny_config().to_dict()) == tiny_config()


def test_m1s_own_config_in_the_hf_spelling_is_m1(m1_data: Path) -> None:
    raw = json.loads((m1_data / "config.json").read_text())
    kinds = ["full_attention" if kind else "linear_attention" for kind in raw["attn_type_list"]]
    hf = without(raw, *TRANSLATED, "auto_map") | {
        "model_type": "minimax",
        "architectures": ["MiniMaxForCausalLM"],
        "layer_types": kinds,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000},
        **{f"{name}_alpha_factor": ALPHA for name in ("full_attn", "linear_attn", "mlp")},
        **{f"{name}_beta_factor": 1.0 for name in ("full_attn", "linear_attn", "mlp")},
    }
    assert M1Config.from_dict(hf) == M1Config.from_dict(raw)


def test_a_config_that_transformers_wrote_is_read(tmp_path: Path) -> None:
    written = MiniMaxConfig(**hf_spelling(bos_token_id=None, eos_token_id=None))
    written.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert M1Config.from_dict(raw) == tiny_config()


def test_m1s_config_through_transformers_is_refused_as_another_model(
    m1_data: Path, tmp_path: Path
) -> None:
    """transformers ignores names it does not know: alternating layers, every factor 1."""
    raw = json.loads((m1_data / "config.json").read_text())
    misread = MiniMaxConfig(**without(raw, "model_type", "auto_map"))
    misread.save_pretrained(tmp_path)
    with pytest.raises(WeightsError) as refusal:
        M1Config.from_dict(json.loads((tmp_path / "config.json").read_text()))
    said = str(refusal.value)
    assert "attn_type_list and layer_types describe different layers, first at layer 0" in said
    assert f"layernorm_mlp_alpha is {ALPHA} and mlp_alpha_factor is 1: one of them is wrong" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"layer_types": ["sliding_attention"] * 8},
            "layer_types holds 'sliding_attention', known",
        ),
        ({"layer_types": "linear_attention"}, "layer_types is 'linear_attention', wanted a list"),
        ({"layer_types": ["full_attention"]}, "attn_type_list has 1 entries for 8 layers"),
        ({"rotary_dim": 16}, "rotary_dim is 16 and rope_parameters.partial_rotary_factor times"),
        ({"rope_theta": 1e7}, "rope_theta is 10000000.0 and rope_parameters.rope_theta is 10000.0"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn', only"),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 4.0}}, "holds ['factor'], known are"),
        ({"rope_parameters": "default"}, "rope_parameters is 'default', wanted an object"),
        ({"partial_rotary_factor": 0.3}, "partial_rotary_factor times head_dim is 4.8"),
        ({"partial_rotary_factor": "0.5"}, "partial_rotary_factor is '0.5', wanted a share of"),
        ({"postnorm": False}, "postnorm is False, but type 'minimax' is always post-norm"),
        ({"mlp_alpha_factor": "2"}, "layernorm_mlp_alpha is '2', not a usable number"),
        ({"eos_token_id": [2, 3]}, "eos_token_id is [2, 3], not one token id, nor null"),
    ],
)
def test_what_contradicts_itself_or_is_unknown_is_refused(
    change: dict[str, object], said: str
) -> None:
    with pytest.raises(WeightsError) as refusal:
        M1Config.from_dict(hf_spelling(**change))
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    "key", ["layer_types", "mlp_alpha_factor", "linear_attn_beta_factor", "rope_parameters"]
)
def test_no_default_stands_in_for_a_missing_key(key: str) -> None:
    with pytest.raises(WeightsError, match="missing keys"):
        M1Config.from_dict(without(hf_spelling(), key))


def test_how_many_channels_rotate_must_be_said() -> None:
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    raw = without(hf_spelling(rope_parameters=rope), "rotary_dim")
    with pytest.raises(WeightsError, match=r"how many channels of a head rotate \(MiniMax-M1: 64"):
        M1Config.from_dict(raw)


def test_a_single_end_token_in_a_list_is_that_token() -> None:
    assert M1Config.from_dict(hf_spelling(eos_token_id=[2])).eos_token_id == 2
