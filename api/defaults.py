"""How a served name answers where a request does not say: its alias, the model, MiniMax's paper."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from m1serve.config import AnswerSettings, ModelSettings
from m1serve.errors import ConfigError
from m1serve.types import HistoryRule, RepetitionStop

_M1_SIZES = {"hidden_size": 6144, "num_hidden_layers": 80}
"""Of MiniMax-M1-40k and -80k; nano has the same architecture and answers otherwise."""
_M1_TYPES = ("minimax_m1", "minimax")
"""Its own model_type, and that of its -hf twins."""
_PUBLISHED = AnswerSettings(history="template", temperature=1.0, top_p=0.95)
_REPETITION = RepetitionStop()
_LAST = AnswerSettings(
    history="exact",
    temperature=1.0,
    top_p=1.0,
    max_tokens_applies_to="all",
    reasoning_field="reasoning_content",
    repetition_stop_tokens=_REPETITION.num_tokens,
    repetition_stop_probability=_REPETITION.probability,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDefaults:
    history: HistoryRule
    temperature: float
    top_p: float
    max_tokens: int | None
    """None means the rest of the context."""
    bounds_answer_only: bool
    """max_tokens counts what follows the think block."""
    reasoning_budget: int | None
    repetition_stop_tokens: int
    """0 means never."""
    repetition_stop_probability: float
    reasoning_fields: tuple[str, ...]
    """Names under which a message carries its reasoning."""


def answer_defaults(model: ModelSettings) -> dict[str, AnswerDefaults]:
    """By served name, the model's own first. Raises ConfigError for an alias that cannot be one."""
    for name in model.aliases:
        if name == model.model_id or not name.isprintable() or not name.strip():
            raise ConfigError(
                f"model.aliases has {name!r}; wanted printable names other than {model.model_id!r}"
            )
    published = (_PUBLISHED,) if _is_minimax_m1(model.path) else ()
    named = {model.model_id: _resolve(model, *published, _LAST)}
    for name, alias in model.aliases.items():
        named[name] = _resolve(alias, model, *published, _LAST)
    return named


def _resolve(*layers: AnswerSettings) -> AnswerDefaults:
    """The first layer that has a value wins."""

    def first(name: str) -> object:
        values = (getattr(layer, name) for layer in layers)
        return next((value for value in values if value is not None), None)

    merged = AnswerSettings(**{name: first(name) for name in AnswerSettings.model_fields})  # type: ignore[arg-type]
    assert merged.temperature is not None
    assert merged.top_p is not None
    assert merged.repetition_stop_tokens is not None
    assert merged.repetition_stop_probability is not None
    names = ("reasoning_content", "reasoning")
    return AnswerDefaults(
        history=HistoryRule(merged.history or "exact"),
        temperature=merged.temperature,
        top_p=merged.top_p,
        max_tokens=merged.max_tokens,
        bounds_answer_only=merged.max_tokens_applies_to == "answer",
        reasoning_budget=merged.reasoning_budget,
        repetition_stop_tokens=merged.repetition_stop_tokens,
        repetition_stop_probability=merged.repetition_stop_probability,
        reasoning_fields=names if merged.reasoning_field == "both" else names[:1],
    )


def _is_minimax_m1(path: Path | None) -> bool:
    file = path / "config.json" if path is not None else None
    if file is None or not file.is_file():
        return False
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        # whoever loads the weights refuses it with its reason
        return False
    is_m1 = isinstance(raw, Mapping) and raw.get("model_type") in _M1_TYPES
    return is_m1 and all(raw.get(name) == size for name, size in _M1_SIZES.items())
