"""Which engine the settings ask for, and with which weights it begins."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import Settings
from m1serve.engine.base import Engine
from m1serve.engine.local import LocalEngine
from m1serve.engine.scripted import ScriptedEngine
from m1serve.engine.watcher import TargetStore
from m1serve.errors import ConfigError
from m1serve.types import Slot, VersionRef

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


def start_engine(settings: Settings, version: VersionRef) -> Engine:
    """Takes as long as reading and verifying the weights; raises WeightsError for bad ones."""
    tokenizer = ChatTokenizer.load(Path(version.path) / "serving")
    if settings.engine.kind == "local":
        return LocalEngine.start(version, settings=settings.engine, tokenizer=tokenizer)
    if settings.engine.script is None:
        raise ConfigError("engine.kind is 'scripted' but engine.script names no file of replies")
    return ScriptedEngine(
        settings.engine.script,
        tokenizer=tokenizer,
        settings=settings.engine,
        weights_version=version.weights_version,
    )
