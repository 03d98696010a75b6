"""Known mistakes of other implementations of M1, each put back into the real model, are seen.

Every case compares with MiniMax's own logits, which the model as it is meets (test_golden.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from m1serve.errors import WeightsError
from m1serve.kernels import moe
from m1serve.kernels.decay import slopes
from m1serve.kernels.reference import lightning_chunked
from m1serve.model import lightning
from m1serve.model.checkpoint import disk_views, load_model, save_model
from m1serve.model.config import M1Config
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.lightning import LightningAttention
from m1serve.model.step import Step

TOLERANCE = 2e-5
"""Of logits whose largest is 4.7; what a trap does must be twice as much to count."""
VLLM_BLOCK = 256


def lightning_layers(model: M1ForCausalLM) -> list[LightningAttention]:
    return [b.self_attn for b in model.blocks if isinstance(b.self_attn, LightningAttention)]


def set_slopes(attention: LightningAttention, slope_H: Tensor) -> None:
    attention.slopes_on = lambda device: slope_H  # type: ignore[method-assign, assignment]


def rounded_decay(slope_H: Tensor) -> Tensor:
    """The slopes whose exp(-s) is the bf16 neighbour of the true one (1.0 for slow heads)."""
    return -torch.exp(-slope_H).bfloat16().double().log().float()


def bf16_decay(model: M1ForCausalLM, _: pytest.MonkeyPatch) -> None:
    for attention in lightning_layers(model):
        set_slopes(attention, rounded_decay(attention.slopes_on(torch.device("cpu"))))


def slopes_of_the_lightning_layers_alone(model: M1ForCausalLM, _: pytest.MonkeyPatch) -> None:
    """As if softmax layers did not count: seven layers, not eight."""
    layers = lightning_layers(model)
    for i, attention in enumerate(layers):
        set_slopes(attention, slopes(model.config.num_attention_heads, len(layers), i))


def slopes_of_local_heads(model: M1ForCausalLM, _: pytest.MonkeyPatch) -> None:
    """Two ranks that build slopes from their own half of the heads."""
    config = model.config
    for attention in lightning_layers(model):
        local = slopes(config.num_attention_heads // 2, config.num_hidden_layers, attention.layer)
        set_slopes(attention, torch.cat([local, local]))


def slopes_of_a_pipeline_stage(model: M1ForCausalLM, _: pytest.MonkeyPatch) -> None:
    """Two stages of four layers that both count from 0."""
    config = model.config
    for attention in lightning_layers(model):
        stage_H = slopes(config.num_attention_heads, config.num_hidden_layers, attention.layer % 4)
        set_slopes(attention, stage_H)


def output_norm_eps_of_the_config(model: M1ForCausalLM, _: pytest.MonkeyPatch) -> None:
    """vLLM hard-codes 1e-5, which is also what the config says of all other norms."""
    for attention in lightning_layers(model):
        attention.norm.eps = model.config.rms_norm_eps


@torch.no_grad()
def qkv_in_three_blocks(model: M1ForCausalLM, _: pytest.MonkeyPatch) -> None:
    """[Q; K; V] read where q, k and v of each head lie together."""
    for attention in lightning_layers(model):
        weight = attention.qkv_proj.weight
        H, E = model.config.num_attention_heads, weight.shape[1]
        weight.copy_(weight.view(3, H, -1, E).transpose(0, 1).reshape(-1, E))


@torch.no_grad()
def bf16_router(model: M1ForCausalLM, _: pytest.MonkeyPatch) -> None:
    for block in model.blocks:
        gate = block.block_sparse_moe.gate.weight
        gate.copy_(gate.bfloat16())


def bf16_router_logits(_: M1ForCausalLM, patch: pytest.MonkeyPatch) -> None:
    """vLLM casts the logits before the softmax."""

    def route(x_NE: Tensor, gate_XE: Tensor, num_chosen: int) -> moe.Routes:
        p_NX = torch.softmax(F.linear(x_NE, gate_XE).bfloat16().float(), -1)
        weight_NP, chosen_NP = p_NX.topk(num_chosen, -1)
        return moe.Routes(weight_NP / weight_NP.sum(-1, keepdim=True), chosen_NP, p_NX)

    patch.setattr(moe, "route", route)


def bf16_head(model: M1ForCausalLM, _: pytest.MonkeyPatch) -> None:
    weight = model.lm_head.weight
    model.logits = (  # type: ignore[method-assign]
        lambda hidden: F.linear(hidden.bfloat16(), weight.bfloat16()).float()
    )


def no_silu_on_v(model: M1ForCausalLM, patch: pytest.MonkeyPatch) -> None:
    real, D = F.silu, model.config.head_dim

    def silu(x: Tensor, inplace: bool = False) -> Tensor:
        if x.shape[-1] != 3 * D:
            return real(x, inplace)
        return torch.cat([real(x[..., : 2 * D]), x[..., 2 * D :]], -1)

    patch.setattr(lightning.F, "silu", silu)


def off_by_one_rows(
    q: Tensor, k: Tensor, v: Tensor, slope_H: Tensor, state: Tensor | None, count_B: Tensor | None
) -> tuple[Tensor, Tensor]:
    """vLLM's and SGLang's prefill: what lies before a block decays one step too little."""
    assert count_B is None
    outputs = []
    for start in range(0, q.shape[1], VLLM_BLOCK):
        q_b, k_b, v_b = (t[:, start : start + VLLM_BLOCK] for t in (q, k, v))
        within, _ = lightning_chunked(q_b, k_b, v_b, slope_H)
        whole, state = lightning_chunked(q_b, k_b, v_b, slope_H, state)
        outputs.append(within + torch.exp(slope_H)[:, None] * (whole - within))
    assert state is not None
    return torch.cat(outputs, 1), state


def off_by_one_decay(model: M1ForCausalLM, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lightning, "lightning_rows", off_by_one_rows)


def interleaved_rotation(model: M1ForCausalLM, patch: pytest.MonkeyPatch) -> None:
    """GPT-J's neighbouring pairs, not NeoX's halves."""

    def rotate(step: Step, x_BHTD: Tensor) -> Tensor:
        cos, sin = step.cos_b1TR, step.sin_b1TR
        R = cos.shape[-1]
        a, b, rest = x_BHTD[..., : 2 * R : 2], x_BHTD[..., 1 : 2 * R : 2], x_BHTD[..., 2 * R :]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        return torch.cat([turned, rest], -1)

    patch.setattr(Step, "rotate", rotate)


@torch.no_grad()
def golden_error(model: M1ForCausalLM, golden: dict[str, Any]) -> float:
    error: float = (model(golden["ids"][:1])[0] - golden["full"][0]).abs().max().item()
    return error


@pytest.mark.parametrize(
    "trap",
    [
        bf16_decay,
        slopes_of_the_lightning_layers_alone,
        slopes_of_a_pipeline_stage,
        slopes_of_local_heads,
        output_norm_eps_of_the_config,
        qkv_in_three_blocks,
        no_silu_on_v,
        off_by_one_decay,
        interleaved_rotation,
        bf16_router,
        bf16_router_logits,
        bf16_head,
    ],
)
def test_a_trap_in_the_code_is_seen(
    trap: Callable[[M1ForCausalLM, pytest.MonkeyPatch], None],
    golden: dict[str, Any],
    golden_model: Callable[..., M1ForCausalLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = golden_model()
    assert golden_error(model, golden) < TOLERANCE
    trap(model, monkeypatch)
    assert golden_error(model, golden) > 2 * TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"rotary_dim": 16}, id="all_channels_rotate"),
        pytest.param({"postnorm": False}, id="residual_is_the_raw_input"),
        pytest.param({"layernorm_linear_attention_alpha": 1.0}, id="alpha_of_lightning_is_1"),
        pytest.param({"layernorm_full_attention_alpha": 1.0}, id="alpha_of_softmax_is_1"),
        pytest.param({"layernorm_mlp_alpha": 1.0}, id="alpha_of_experts_is_1"),
        pytest.param({"rope_theta": 10_000.0}, id="theta_is_a_default"),
        pytest.param({"rms_norm_eps": 1e-6}, id="all_norms_have_the_output_norms_eps"),
        pytest.param({"num_experts_per_tok": 1}, id="one_expert_a_token"),
    ],
)
def test_a_trap_in_the_config_is_seen(
    changes: dict[str, object],
    golden: dict[str, Any],
    golden_model: Callable[..., M1ForCausalLM],
) -> None:
    assert golden_error(golden_model(**changes), golden) > 2 * TOLERANCE


@torch.no_grad()
def test_a_block_of_256_tokens_hides_the_decay_that_is_one_step_short(
    golden: dict[str, Any],
    golden_model: Callable[..., M1ForCausalLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Why the comparison is of 560 tokens: shorter ones pass with the trap in place."""
    model = golden_model()
    off_by_one_decay(model, monkeypatch)
    logits = model(golden["ids"][:1, :VLLM_BLOCK])[0]
    assert (logits - golden["full"][0, :VLLM_BLOCK]).abs().max() < TOLERANCE


def test_a_config_is_never_completed_with_defaults(golden_config: M1Config) -> None:
    """Read with other names, M1's config silently meant alternating layers and alpha 1."""
    raw = golden_config.to_dict()
    for name in raw.keys() - {"hidden_act", "tie_word_embeddings", "bos_token_id", "eos_token_id"}:
        with pytest.raises(WeightsError, match=name):
            M1Config.from_dict({key: value for key, value in raw.items() if key != name})


def test_m1s_weights_do_not_fit_alternating_layers(
    golden: dict[str, Any], golden_config: M1Config, tmp_path: Path
) -> None:
    """transformers makes such layers of M1's raw config and leaves what does not fit random."""
    alternating = M1ForCausalLM(replace(golden_config, attn_type_list=(0, 1) * 4)).eval()
    alternating.init_weights(torch.Generator().manual_seed(0))
    save_model(alternating, tmp_path, dtype=torch.float32)
    right = {**alternating.config.to_dict(), "attn_type_list": [0] * 7 + [1]}
    (tmp_path / "config.json").write_text(json.dumps(right))
    with pytest.raises(WeightsError, match="not those of its config"):
        load_model(tmp_path)
    with torch.no_grad():
        for name, view in disk_views(alternating).items():
            if name in golden["sd"]:
                view.copy_(golden["sd"][name])
    assert golden_error(alternating, golden) > 1
