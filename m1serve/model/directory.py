"""A model directory on disk: which files it has, and what config, tokenizer and index say."""

from __future__ import annotations

import json
from pathlib import Path

from m1serve.errors import WeightsError
from m1serve.model.config import M1Config
from m1serve.model.token_ids import TOKENIZER_FILE, resolve_token_ids

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_json_object(file: Path) -> dict[str, object]:
    """WeightsError when the file is absent, no JSON, or JSON of something else."""
    try:
        raw = json.loads(file.read_bytes())
    except OSError as error:
        raise WeightsError(f"cannot read {file}: {error.strerror}; is it a model directory?") from (
            error
        )
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file} is not JSON ({error}); fetch the file again") from error
    if not isinstance(raw, dict):
        raise WeightsError(
            f"{file} holds a {type(raw).__name__}, wanted an object; fetch the file again"
        )
    return raw


def read_config(path: Path) -> M1Config:
    """The config.json of a model directory, in either spelling.

    Token ids that it leaves null come from the tokenizer.json beside it, if there is one; a
    tokenizer that does not belong to the config is refused.
    """
    config = M1Config.from_dict(read_json_object(path / CONFIG_FILE))
    tokenizer = path / TOKENIZER_FILE
    return resolve_token_ids(config, tokenizer) if tokenizer.exists() else config


def read_weight_map(path: Path) -> dict[str, str] | None:
    """Tensor name -> name of its file, as the index says; None without an index."""
    index = path / INDEX_FILE
    if not index.exists():
        return None
    try:
        weight_map = {
            str(k): str(v) for k, v in json.loads(index.read_bytes())["weight_map"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"{index} is not a safetensors index: {error!r}; fetch the file again"
        ) from error
    strange = sorted({name for name in weight_map.values() if Path(name).name != name})
    if strange:
        raise WeightsError(f"{index} points outside its directory: {strange}; fetch the file again")
    return weight_map


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files of a model directory, each once, whether or not they are there."""
    weight_map = read_weight_map(path)
    if weight_map is None:
        return (path / SINGLE_FILE,)
    return tuple(path / name for name in sorted(set(weight_map.values())))
