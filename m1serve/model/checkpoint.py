"""Model directories: config.json and safetensors, one file or shards, under M1's on-disk names.

Read through one buffer and written a shard at a time; both directions use one table of views into
the parameters.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from m1serve.errors import WeightsError
from m1serve.model.config import M1Config
from m1serve.model.devices import device_of
from m1serve.model.directory import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, read_config
from m1serve.model.footprint import footprint
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.inventory import (
    ROUTER,
    Inventory,
    abridged,
    narrow_routers,
    take_inventory,
    tensor_problems,
)
from m1serve.model.tensor_stream import TensorStream

logger = logging.getLogger(__name__)

FETCH_BOTH = f"fetch {CONFIG_FILE} and weights from one checkpoint"


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


def wanted_shapes(config: M1Config) -> dict[str, tuple[int, ...]]:
    """On-disk name -> shape of every tensor that a checkpoint of this config holds."""
    model = empty_model(config, device="meta", dtype=torch.bfloat16)
    return {name: tuple(view.shape) for name, view in disk_views(model).items()}


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


@torch.no_grad()
def load_model(
    path: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> M1ForCausalLM:
    """Loads a model directory: peak host memory is the model (if it is there) and one buffer.

    WeightsError names missing files, missing, unexpected and misshapen tensors, and memory that
    does not suffice, before a weight is read; NaN and infinite weights as they come.
    """
    config = read_config(path)
    inventory = _checked_inventory(path, config)
    require_memory(config, device=device, dtype=dtype)
    model = empty_model(config, device=device, dtype=dtype)
    views = disk_views(model)
    stream = TensorStream(device=device)
    for file, tensors in inventory.files.items():
        stream.fill(file, {name: t for name, t in tensors.items() if name in views}, views)
    return model


def save_model(
    model: M1ForCausalLM,
    path: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = 4 * 2**30,
) -> None:
    """Writes config.json and the weights in `dtype`, the router in fp32; copies one shard.

    An index that is there already would go before one file of weights: it is removed.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / INDEX_FILE).unlink(missing_ok=True)
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


def require_memory(
    config: M1Config, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> None:
    """WeightsError when the weights alone exceed what is free, before the system kills us."""
    found = device_of(device)
    size = dtype.itemsize
    num_bytes = footprint(config, weight_itemsize=size, kv_itemsize=size).weight_bytes
    if found is not None and num_bytes > found.free_bytes:
        raise WeightsError(
            f"the weights take {num_bytes / 2**30:,.1f} GiB in {dtype}, {found.name} has "
            f"{found.free_bytes / 2**30:,.1f} free; `m1serve doctor --model` says what would do"
        )


def _checked_inventory(path: Path, config: M1Config) -> Inventory:
    inventory = take_inventory(path)
    if problems := inventory.file_problems():
        raise WeightsError(f"{path} is not a whole checkpoint: {abridged(problems)}")
    if problems := tensor_problems(inventory, wanted_shapes(config)):
        raise WeightsError(
            f"the weights in {path} are not those of its {CONFIG_FILE}: {abridged(problems)}; "
            f"{FETCH_BOTH}"
        )
    if narrow := narrow_routers(inventory):
        logger.warning(
            "%s stores %d routers narrower than fp32, so a cast came before: MiniMax's own are "
            "fp32. They are used as they are, in fp32",
            path,
            len(narrow),
        )
    return inventory
