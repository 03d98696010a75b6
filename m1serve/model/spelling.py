"""A config.json spells one model in two ways, MiniMax's and transformers' (`-hf`); both become one.

Pure: mappings in, mappings and problems out. Nothing is guessed and no default is filled in that
would make another model: what is missing is left out, what contradicts itself is a problem.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard

TRANSFORMERS_TYPE = "minimax"
"""The model_type of transformers' class; its norm order is fixed, so it has no `postnorm`."""

_OTHER_NAMES = {
    "layernorm_full_attention_alpha": "full_attn_alpha_factor",
    "layernorm_full_attention_beta": "full_attn_beta_factor",
    "layernorm_linear_attention_alpha": "linear_attn_alpha_factor",
    "layernorm_linear_attention_beta": "linear_attn_beta_factor",
    "layernorm_mlp_alpha": "mlp_alpha_factor",
    "layernorm_mlp_beta": "mlp_beta_factor",
}
_LAYER_KINDS = {"linear_attention": 0, "full_attention": 1}
_ROPE_KEYS = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
_TRANSLATED = (*_OTHER_NAMES, "attn_type_list", "rope_theta", "rotary_dim")


@dataclass(frozen=True, slots=True)
class _Reading:
    """What one key of the file says about a field."""

    field: str
    key: str
    value: object


def in_minimax_spelling(raw: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """The same config under MiniMax's own names, and what is wrong with its spelling.

    A field that two keys name must have one value. Fields that no key names stay absent.
    """
    problems = [*_layer_type_problems(raw), *_rope_problems(raw), *_factor_problems(raw)]
    readings: dict[str, list[_Reading]] = {}
    for reading in _readings(raw):
        readings.setdefault(reading.field, []).append(reading)
    values = {key: value for key, value in raw.items() if key not in _TRANSLATED}
    for field, said in readings.items():
        values[field] = said[0].value
        problems += [
            _contradiction(said[0], other) for other in said[1:] if _differ(said[0], other)
        ]
    problems += _fill_transformers_rules(raw, values)
    for name in ("bos_token_id", "eos_token_id"):
        match values.get(name):
            case [int() as only]:
                values[name] = only
    return values, problems


def _readings(raw: Mapping[str, object]) -> Iterator[_Reading]:
    for field in _TRANSLATED:
        if field in raw:
            yield _Reading(field, field, raw[field])
    for field, key in _OTHER_NAMES.items():
        if key in raw:
            yield _Reading(field, key, raw[key])
    kinds = raw.get("layer_types")
    if isinstance(kinds, list) and not _layer_type_problems(raw):
        yield _Reading("attn_type_list", "layer_types", [_LAYER_KINDS[kind] for kind in kinds])
    rope = raw.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        yield _Reading("rope_theta", "rope_parameters.rope_theta", rope["rope_theta"])
    for key, factor in _partial_rotary_factors(raw):
        head_dim = _head_dim(raw)
        if is_number(head_dim) and is_number(factor):
            rotated = float(factor) * head_dim
            dim = int(rotated) if rotated.is_integer() else rotated
            yield _Reading("rotary_dim", f"{key} times head_dim", dim)


def _partial_rotary_factors(raw: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    name = "partial_rotary_factor"
    if raw.get(name) is not None:
        yield name, raw[name]
    rope = raw.get("rope_parameters")
    if isinstance(rope, Mapping) and rope.get(name) is not None:
        yield f"rope_parameters.{name}", rope[name]


def _factor_problems(raw: Mapping[str, object]) -> list[str]:
    return [
        f"{key} is {factor!r}, wanted a share of head_dim"
        for key, factor in _partial_rotary_factors(raw)
        if not is_number(factor)
    ]


def _fill_transformers_rules(raw: Mapping[str, object], values: dict[str, object]) -> list[str]:
    """What transformers' class does without a key of its own, where the file is of its type."""
    if str(raw.get("model_type", "")).lower() != TRANSFORMERS_TYPE:
        return []
    if raw.get("head_dim") is None and (head_dim := _head_dim(raw)) is not None:
        values["head_dim"] = head_dim
    problems = []
    if "rotary_dim" not in values:
        problems.append(
            "neither rotary_dim nor rope_parameters.partial_rotary_factor says how many channels "
            "of a head rotate (MiniMax-M1: 64; a model that transformers trained: head_dim)"
        )
    if raw.get("postnorm", True) is not True:
        problems.append(f"postnorm is {raw['postnorm']!r}, but type 'minimax' is always post-norm")
    values["postnorm"] = True
    return problems


def _head_dim(raw: Mapping[str, object]) -> int | None:
    head_dim = raw.get("head_dim")
    if type(head_dim) is int:
        return head_dim
    hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    if head_dim is None and type(hidden) is int and type(heads) is int and heads > 0:
        return hidden // heads
    return None


def _layer_type_problems(raw: Mapping[str, object]) -> list[str]:
    kinds = raw.get("layer_types")
    if kinds is None:
        return []
    known = list(_LAYER_KINDS)
    if not isinstance(kinds, list):
        return [f"layer_types is {kinds!r}, wanted a list of {known}"]
    unknown = sorted({repr(kind) for kind in kinds if kind not in known})
    return [f"layer_types holds {', '.join(unknown)}, known are {known}"] if unknown else []


def _rope_problems(raw: Mapping[str, object]) -> list[str]:
    rope = raw.get("rope_parameters")
    if rope is None:
        return []
    if not isinstance(rope, Mapping):
        return [f"rope_parameters is {rope!r}, wanted an object"]
    problems = []
    if unknown := sorted(rope.keys() - _ROPE_KEYS):
        problems.append(f"rope_parameters holds {unknown}, known are {sorted(_ROPE_KEYS)}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        problems.append(f"rope_parameters.rope_type is {kind!r}, only 'default' is supported")
    return problems


def _differ(one: _Reading, other: _Reading) -> bool:
    return one.value != other.value


def _contradiction(one: _Reading, other: _Reading) -> str:
    if isinstance(one.value, list) and isinstance(other.value, list):
        pairs = enumerate(zip(one.value, other.value, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), None)
        where = "in length" if first is None else f"first at layer {first}"
        return f"{one.key} and {other.key} describe different layers, {where}"
    return f"{one.key} is {one.value!r} and {other.key} is {other.value!r}: one of them is wrong"


def is_number(value: object) -> TypeGuard[int | float]:
    """Finite, as a float too: JSON knows integers of any length."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max
