"""The ids that a tokenizer.json gives its tokens, and whether they are those of a config.

Reads the JSON alone: checking a version costs no tokenizer. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from m1serve.chat.tokenizer import BOS, CONTROL, EOS
from m1serve.errors import WeightsError
from m1serve.model.config import M1Config

TOKENIZER_FILE = "tokenizer.json"
_FETCH = "fetch the tokenizer.json that belongs to the checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    num_tokens: int
    """One more than the largest id"""
    control: Mapping[str, int]
    """The control tokens that the tokenizer knows -> their ids"""


def read_token_ids(file: Path) -> TokenIds:
    """WeightsError when the file is absent or no tokenizer.json."""
    try:
        ids = dict(_ids(json.loads(file.read_bytes())))
    except OSError as error:
        raise WeightsError(f"cannot read {file} ({error.strerror}); {_FETCH}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{file} is no tokenizer.json ({error!r}); {_FETCH}") from error
    return TokenIds(
        num_tokens=max(ids.values(), default=-1) + 1,
        control={name: ids[name] for name in CONTROL if name in ids},
    )


def resolve_token_ids(config: M1Config, file: Path) -> M1Config:
    """The config with begin and end of sentence as the tokenizer in `file` has them.

    WeightsError when the tokenizer is not this model's: ids past the vocabulary, no control
    tokens, or other ids than the config names.
    """
    tokens = read_token_ids(file)
    if tokens.num_tokens > config.vocab_size:
        raise WeightsError(
            f"{file} is the wrong tokenizer: it has {tokens.num_tokens} tokens, "
            f"the model {config.vocab_size}; {_FETCH}"
        )
    if missing := [name for name in CONTROL if name not in tokens.control]:
        raise WeightsError(f"{file} has no tokens {missing}; {_FETCH}")
    return replace(
        config,
        bos_token_id=_agreed("bos_token_id", config.bos_token_id, BOS, tokens, file),
        eos_token_id=_agreed("eos_token_id", config.eos_token_id, EOS, tokens, file),
    )


def _agreed(field: str, configured: int | None, token: str, tokens: TokenIds, file: Path) -> int:
    token_id = tokens.control[token]
    if configured not in (None, token_id):
        raise WeightsError(
            f"config.json says {field} {configured}, but {token} is {token_id} in {file}; "
            f"{_FETCH}, or set {field} to null"
        )
    return token_id


def _ids(raw: dict[str, object]) -> Iterator[tuple[str, int]]:
    """An added token keeps the id that the vocabulary gives its text, as in `tokenizers`."""
    model, added = raw["model"], raw.get("added_tokens") or []
    if not (isinstance(model, dict) and isinstance(added, list)):
        raise TypeError("model and added_tokens")
    for token in added:
        yield str(token["content"]), int(token["id"])
    for content, token_id in model["vocab"].items():
        yield content, int(token_id)
