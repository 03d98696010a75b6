"""The recipe of a cold start: one TOML file with the model, the demonstrations and the schedule."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from m1serve.envs.base import FAMILIES
from m1serve.envs.saying import Shortcuts
from m1serve.errors import ConfigError
from m1serve.model.config import SOFTMAX, M1Config
from m1serve.online_rl.demonstrations import DemonstrationMix

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    hidden_size: int = 192
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 32
    rotary_dim: int = 16
    intermediate_size: int = 256
    num_local_experts: int = 4
    num_experts_per_tok: int = 2
    max_position_embeddings: int = 8192

    def config(self, vocab_size: int, bos_token_id: int, eos_token_id: int) -> M1Config:
        """Every eighth layer is softmax; the residual scale is DeepNorm's, (2 layers)^(1/4)."""
        alpha = (2.0 * self.num_hidden_layers) ** 0.25
        layers = range(self.num_hidden_layers)
        return M1Config(
            **{f.name: getattr(self, f.name) for f in fields(self)},
            vocab_size=vocab_size,
            attn_type_list=tuple(SOFTMAX if i % 8 == 7 else 0 for i in layers),
            rope_theta=10_000.0,
            rms_norm_eps=1e-5,
            layernorm_full_attention_alpha=alpha,
            layernorm_full_attention_beta=1.0,
            layernorm_linear_attention_alpha=alpha,
            layernorm_linear_attention_beta=1.0,
            layernorm_mlp_alpha=alpha,
            layernorm_mlp_beta=1.0,
            postnorm=True,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerShape:
    vocab_size: int = 1280
    texts: int = 8000
    """Episodes it is trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    desks: int = 8
    """System prompts of one optimizer step."""
    desk_rows: int = 512
    desk_parts: int = 6
    """Of like length, so that little is padding."""
    maths_rows: int = 256
    maths_parts: int = 2
    max_tokens: int = 384
    """Longer conversations are not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    steps: int
    lr: float = 3e-3
    warmup: float = 0.03
    """Share of the steps."""
    floor: float = 0.02
    """Last learning rate, as a share of the first."""
    weight_decay: float = 0.05
    grad_clip: float = 1.0
    context_weight: float = 0.1
    """Loss weight of tokens that the model reads; those it says weigh 1."""
    balance_weight: float = 0.01
    precision: Literal["tf32", "bf16"] = "tf32"
    """Of matrix products on an accelerator; weights and norms stay in fp32."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SftRecipe:
    model: ModelShape
    tokenizer: TokenizerShape
    batch: BatchShape
    schedule: Schedule
    demonstrations: DemonstrationMix


def read_recipe(path: Path) -> SftRecipe:
    """ConfigError names keys that do not exist."""
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the recipe {path}: {error}") from error
    known = {"model", "tokenizer", "batch", "schedule", "demonstrations"}
    if raw.keys() - known:
        raise ConfigError(f"{path} has sections {sorted(raw.keys() - known)}; known: {known}")
    return SftRecipe(
        model=_section(ModelShape, raw.get("model", {}), path),
        tokenizer=_section(TokenizerShape, raw.get("tokenizer", {}), path),
        batch=_section(BatchShape, raw.get("batch", {}), path),
        schedule=_section(Schedule, raw.get("schedule", {}), path),
        demonstrations=_mix(raw.get("demonstrations", {}), path),
    )


def _mix(raw: Mapping[str, Any], path: Path) -> DemonstrationMix:
    shortcuts = _section(Shortcuts, raw.get("shortcuts", {}), path)
    mix = _section(DemonstrationMix, {**raw, "shortcuts": shortcuts}, path)
    strange = (mix.weights.keys() | shortcuts.hasty.keys()) - set(FAMILIES)
    if strange:
        raise ConfigError(f"{path} names families {sorted(strange)}; known: {FAMILIES}")
    return mix


def _section(kind: type[T], raw: Mapping[str, Any], path: Path) -> T:
    try:
        return kind(**raw)
    except TypeError as error:
        raise ConfigError(f"{path}, {kind.__name__}: {error}") from error
