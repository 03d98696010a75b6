"""M1Config: one description for nano, slice and MiniMax-M1, read from their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from m1serve.errors import WeightsError
from m1serve.model.spelling import TRANSFORMERS_TYPE, in_minimax_spelling, is_number

LIGHTNING, SOFTMAX = 0, 1
MODEL_TYPES = ("minimax_m1", "minimax_text_01", TRANSFORMERS_TYPE)
ARCHITECTURES = ("MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxForCausalLM")
_TOO_LARGE = 2**31
"""For any width or count."""
_TOKEN_IDS = ("bos_token_id", "eos_token_id")

# what this code does; a config.json that asks for anything else describes another model
_FIXED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "tie_word_embeddings": (False,),
    "shared_intermediate_size": (0, None),
    "sliding_window": (None,),
    "attention_dropout": (0.0,),
    "rope_scaling": (None,),
    "quantization_config": (None,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class M1Config:
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    attn_type_list: tuple[int, ...]
    """One entry a layer: 0 lightning, 1 softmax."""
    num_attention_heads: int
    num_key_value_heads: int
    """Of the softmax layers; lightning layers have num_attention_heads of everything."""
    head_dim: int
    rotary_dim: int
    """Only the first so many channels of a head rotate."""
    rope_theta: float
    intermediate_size: int
    """Of one expert."""
    num_local_experts: int
    num_experts_per_tok: int
    rms_norm_eps: float
    max_position_embeddings: int
    layernorm_full_attention_alpha: float
    layernorm_full_attention_beta: float
    layernorm_linear_attention_alpha: float
    layernorm_linear_attention_beta: float
    layernorm_mlp_alpha: float
    layernorm_mlp_beta: float
    postnorm: bool
    """The residual is the normalised input, not the input."""
    bos_token_id: int | None
    eos_token_id: int | None
    """None in MiniMax's own files; `read_config` takes it from the tokenizer beside them."""

    @classmethod
    def from_dict(cls, raw: Mapping[str, object]) -> M1Config:
        """Parses a config.json in either spelling (see `spelling`).

        WeightsError names all that is missing, wrong, unknown or contradicts itself.
        """
        spelled, problems = in_minimax_spelling(raw)
        problems = [*_architecture_problems(raw), *problems]
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in spelled and name not in _TOKEN_IDS]
        if missing:
            problems.append(f"missing keys {missing}")
        values = {name: spelled.get(name) for name in names}
        problems += [
            f"{name} is {value!r}, not {_wanted(name)}"
            for name, value in values.items()
            if name in spelled and not _is_plausible(name, value)
        ]
        if not problems:
            values["attn_type_list"] = tuple(values["attn_type_list"])  # type: ignore[arg-type]
            config = cls(**values)  # type: ignore[arg-type]
            problems = config._shape_problems()
        if problems:
            raise WeightsError(
                f"config.json does not describe a model this code runs: {'; '.join(problems)}. "
                "Point to a MiniMax-M1 or MiniMax-Text-01 checkpoint, or its -hf twin, with its "
                "original config.json"
            )
        return config

    def to_dict(self) -> dict[str, object]:
        """What config.json holds; `from_dict` reads it back."""
        return {
            "model_type": "minimax_m1",
            "architectures": ["MiniMaxM1ForCausalLM"],
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            **asdict(self),
            "attn_type_list": list(self.attn_type_list),
        }

    @property
    def lightning_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.attn_type_list) if kind == LIGHTNING)

    @property
    def softmax_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.attn_type_list) if kind == SOFTMAX)

    def _shape_problems(self) -> list[str]:
        kinds, num_layers = self.attn_type_list, self.num_hidden_layers
        num_heads, num_kv_heads = self.num_attention_heads, self.num_key_value_heads
        checks = {
            f"attn_type_list has {len(kinds)} entries for {num_layers} layers": (
                len(kinds) == num_layers
            ),
            f"attn_type_list holds other values than 0 and 1: {sorted(set(kinds))}": (
                set(kinds) <= {LIGHTNING, SOFTMAX}
            ),
            f"{num_heads} heads do not divide among {num_kv_heads} kv heads": (
                num_heads % num_kv_heads == 0
            ),
            f"rotary_dim {self.rotary_dim} is odd or beyond head_dim {self.head_dim}": (
                self.rotary_dim % 2 == 0 and self.rotary_dim <= self.head_dim
            ),
            f"top {self.num_experts_per_tok} of {self.num_local_experts} experts": (
                1 <= self.num_experts_per_tok <= self.num_local_experts
            ),
        } | {
            f"{name} {token_id} is beyond the vocabulary of {self.vocab_size}": (
                token_id is None or 0 <= token_id < self.vocab_size
            )
            for name, token_id in zip(
                _TOKEN_IDS, (self.bos_token_id, self.eos_token_id), strict=True
            )
        }
        return [problem for problem, is_fine in checks.items() if not is_fine]


def _architecture_problems(raw: Mapping[str, object]) -> list[str]:
    problems = []
    model_type = str(raw.get("model_type", ""))
    if model_type.lower() not in MODEL_TYPES:
        problems.append(f"model_type is {model_type!r}, wanted one of {list(MODEL_TYPES)}")
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not any(a in ARCHITECTURES for a in architectures):
        problems.append(f"architectures is {architectures!r}, wanted one of {list(ARCHITECTURES)}")
    for name, accepted in _FIXED.items():
        if name in raw and raw[name] not in accepted:
            problems.append(f"{name} is {raw[name]!r}, only {accepted[0]!r} is supported")
    return problems


def _wanted(name: str) -> str:
    return {
        "attn_type_list": "a list of 0 (lightning) and 1 (softmax)",
        "postnorm": "true or false",
        **dict.fromkeys(_TOKEN_IDS, "one token id, nor null"),
    }.get(name, "a usable number")


def _is_plausible(name: str, value: object) -> bool:
    if name in _TOKEN_IDS:
        return value is None or type(value) is int
    if name == "attn_type_list":
        return isinstance(value, list | tuple) and all(type(kind) is int for kind in value)
    if name == "postnorm":
        return isinstance(value, bool)
    if name.startswith("layernorm_") or name in ("rope_theta", "rms_norm_eps"):
        is_free = name.startswith("layernorm_")
        return is_number(value) and (is_free or value > 0)
    return type(value) is int and 0 < value < _TOO_LARGE
