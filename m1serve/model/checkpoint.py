"""Model directories: config.json and safetensors, one file or shards, under M1's on-disk names.

Read and written a shard at a time; both directions use one table of views into the parameters.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from m1serve.errors import WeightsError
from m1serve.model.config import M1Config
from m1serve.model.hybrid import M1ForCausalLM

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# transformers saves these; they follow from the config and are recomputed here
DERIVED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
ROUTER = ".block_sparse_moe.gate.weight"


def disk_views(model: M1ForCausalLM) -> dict[str, Tensor]:
    """On-disk name -> the part of a parameter that it fills; memory is shared with the model."""
    views: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        head, _, tail = name.rpartition(".")
        t = parameter.detach()
        if tail == "w13_X2FE":
            for expert, (w1, w3) in enumerate(zip(*t.chunk(2, 1), strict=True)):
                views[f"model.{head}.experts.{expert}.w1.weight"] = w1
                views[f"model.{head}.experts.{expert}.w3.weight"] = w3
        elif tail == "w2_XEF":
            for expert, w2 in enumerate(t):
                views[f"model.{head}.experts.{expert}.w2.weight"] = w2
        else:
            views[name if name.startswith("lm_head.") else f"model.{name}"] = t
    return views


def empty_model(
    config: M1Config, *, device: torch.device | str, dtype: torch.dtype
) -> M1ForCausalLM:
    """A model of unset weights on the device: `dtype` throughout, the router in fp32."""
    with torch.device("meta"):
        model = M1ForCausalLM(config).eval()
    for path, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            kept = _disk_dtype(f"{path}.{name}", dtype)
            empty = torch.empty(p.shape, dtype=kept, device=device)
            setattr(module, name, nn.Parameter(empty))
    return model


def read_config(path: Path) -> M1Config:
    """The config.json of a model directory."""
    file = path / CONFIG_FILE
    try:
        raw = json.loads(file.read_text())
    except OSError as error:
        raise WeightsError(f"cannot read {file}: {error.strerror}; is it a model directory?") from (
            error
        )
    except ValueError as error:
        raise WeightsError(f"{file} is not JSON ({error}); fetch the file again") from error
    if not isinstance(raw, dict):
        raise WeightsError(f"{file} holds a {type(raw).__name__}, wanted an object")
    return M1Config.from_dict(raw)


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files of a model directory, each once."""
    index = path / INDEX_FILE
    if not index.exists():
        return (path / SINGLE_FILE,)
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is not a safetensors index: {error!r}") from error
    strange = sorted(name for name in names if Path(name).name != name)
    if strange:
        raise WeightsError(f"{index} points outside its directory: {strange}")
    return tuple(path / name for name in sorted(names))


@torch.no_grad()
def load_model(
    path: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> M1ForCausalLM:
    """Loads a model directory. WeightsError names missing, unexpected and misshapen tensors."""
    model = empty_model(read_config(path), device=device, dtype=dtype)
    views = disk_views(model)
    missing, problems = set(views), list[str]()
    for file in weight_files(path):
        for name, t in _tensors(file).items():
            if name.endswith(DERIVED):
                continue
            if name not in views:
                problems.append(f"unexpected {name}")
            elif t.shape != views[name].shape:
                problems.append(f"{name} is {list(t.shape)}, wanted {list(views[name].shape)}")
            else:
                views[name].copy_(t)
            missing.discard(name)
    problems += [f"missing {name}" for name in sorted(missing)]
    if problems:
        raise WeightsError(
            f"the weights in {path} are not those of its {CONFIG_FILE}: {_listed(problems)}"
        )
    return model


def save_model(
    model: M1ForCausalLM,
    path: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = 4 * 2**30,
) -> None:
    """Writes config.json and the weights in `dtype`, the router in fp32; copies one shard."""
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG_FILE).write_text(json.dumps(model.config.to_dict(), indent=1) + "\n")
    views = disk_views(model)
    shards = _shards(views, dtype, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        single = len(shards) == 1
        file = SINGLE_FILE if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        copies = {name: views[name].to(_disk_dtype(name, dtype), copy=True).cpu() for name in names}
        save_file(copies, path / file, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(_disk_bytes(name, view, dtype) for name, view in views.items())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")


def _disk_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name.endswith(ROUTER) else dtype


def _disk_bytes(name: str, view: Tensor, dtype: torch.dtype) -> int:
    return view.numel() * _disk_dtype(name, dtype).itemsize


def _shards(views: dict[str, Tensor], dtype: torch.dtype, max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, view in views.items():
        num_bytes = _disk_bytes(name, view, dtype)
        if shards[-1] and filled + num_bytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += num_bytes
    return shards


def _tensors(file: Path) -> dict[str, Tensor]:
    """Of a safetensors file, mapped rather than read; its errors as WeightsError."""
    try:
        return load_file(file)
    except FileNotFoundError as error:
        raise WeightsError(f"{file} is missing; fetch the checkpoint again") from error
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{file} is truncated or not safetensors ({error}); fetch the file again"
        ) from error


def _listed(problems: list[str], most: int = 20) -> str:
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more
