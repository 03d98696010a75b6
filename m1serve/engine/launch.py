"""Which engine the settings ask for, and with which weights it begins."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import Settings
from m1serve.engine.base import Engine
from m1serve.engine.local import LocalEngine
from m1serve.engine.scripted import ScriptedEngine
from m1serve.engine.watcher import TargetStore
from m1serve.errors import ConfigError, WeightsError
from m1serve.model.directory import weight_files
from m1serve.model.tensor_file import stored_tensors
from m1serve.store import Store
from m1serve.types import Slot, VersionRef

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 5e-4
"""A step makes hundreds of calls that give the interpreter away; asking for it back after 5 ms, the
default, costs a third of the speed while an event loop is busy beside it."""


def tune_process(settings: Settings) -> None:
    """For the process that serves: few torch threads, short turns on the interpreter."""
    torch.set_num_threads(settings.engine.num_threads)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def first_version(store: TargetStore, settings: Settings, slot: Slot = Slot.STABLE) -> VersionRef:
    """What the store wants served now; an empty slot serves what is stable."""
    model_id = settings.model.model_id
    found = store.weights.target(model_id, slot) or store.weights.target(model_id, Slot.STABLE)
    if found is None:
        raise ConfigError(
            f"the store has no version of {model_id!r} to serve; import one: m1serve weights init"
        )
    return found


def start_best_engine(store: Store, settings: Settings, slot: Slot = Slot.STABLE) -> Engine:
    """With what should serve; when that is damaged, with what served before it.

    The watcher tries the damaged version again and reports why it is refused. Raises the first
    refusal when no version is good.
    """
    wanted = first_version(store, settings, slot)
    refusals: list[WeightsError | ConfigError] = []
    for version in (wanted, *_last_good(store, wanted)):
        try:
            return start_engine(settings, version)
        except (WeightsError, ConfigError) as error:
            logger.error("%s cannot serve, trying the one before: %s", version, error)
            refusals.append(error)
    raise refusals[0]


def served_tokenizer(store: Store, weights_version: str) -> ChatTokenizer:
    version = store.weights.get(weights_version)
    if version is None:
        raise ConfigError(f"the engine serves {weights_version}, which the store does not know")
    return ChatTokenizer.load(Path(version.path) / "serving")


def start_engine(settings: Settings, version: VersionRef) -> Engine:
    """Takes as long as reading and verifying the weights; raises WeightsError for bad ones."""
    tokenizer = ChatTokenizer.load(Path(version.path) / "serving")
    if settings.engine.kind == "local":
        device = serving_device(settings.engine.device)
        return LocalEngine.start(
            version,
            settings=settings.engine,
            tokenizer=tokenizer,
            device=device,
            dtype=serving_dtype(settings.engine.dtype, version, device=device),
        )
    if settings.engine.script is None:
        raise ConfigError("engine.kind is 'scripted' but engine.script names no file of replies")
    return ScriptedEngine(
        settings.engine.script,
        tokenizer=tokenizer,
        settings=settings.engine,
        weights_version=version.weights_version,
    )


def serving_device(wanted: str) -> str:
    """`cpu` or `cuda`; ConfigError when a GPU is asked for and there is none."""
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise ConfigError(
            "engine.device is 'cuda' and torch finds no GPU; install a driver and a CUDA build of "
            "torch, or set engine.device to 'cpu'"
        )
    return "cuda" if has_gpu and wanted != "cpu" else "cpu"


def serving_dtype(wanted: str, version: VersionRef, *, device: str) -> torch.dtype:
    """Of weights and cached keys. WeightsError for files that cannot be read."""
    if wanted == "auto":
        if device == "cpu":
            return torch.float32
        files = weight_files(Path(version.path) / "serving")
        stored = {t.dtype for file in files for t in stored_tensors(file).values()}
        return torch.bfloat16 if "BF16" in stored else torch.float32
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def _last_good(store: Store, wanted: VersionRef) -> list[VersionRef]:
    """What replicas said they served, the latest first; then the ancestors of what is wanted."""
    known = {v.weights_version: v for v in store.weights.list()}
    model_id = wanted.weights_version.rpartition("@")[0]
    deployments = store.weights.deployments(model_id)
    names = [d.weights_version for d in sorted(deployments, key=lambda d: -d.verified_at)]
    version = known.get(wanted.weights_version)
    while version is not None and version.parent is not None:
        names.append(version.parent)
        version = known.get(version.parent)
    good = dict.fromkeys(n for n in names if n in known and n != wanted.weights_version)
    return [known[name].ref for name in good]
