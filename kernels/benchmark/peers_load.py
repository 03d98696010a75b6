"""Imports single files of packages that are not installed, with stand-ins for what they import."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch


def import_from(site: Path) -> None:
    if str(site) not in sys.path:
        sys.path.insert(0, str(site))


def load_file(name: str, file: Path, surroundings: dict[str, ModuleType]) -> ModuleType:
    """Imports one file of a package whose other modules are replaced while it is read."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    replaced = {stub: sys.modules.get(stub) for stub in surroundings}
    sys.modules.update(surroundings)
    # dataclasses look their module up
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        for stub, original in replaced.items():
            if original is None:
                del sys.modules[stub]
            else:
                sys.modules[stub] = original
    return module


def vllm_surroundings() -> dict[str, ModuleType]:
    """The names vLLM's file takes from the rest of vLLM."""
    triton = importlib.import_module("triton")
    language = importlib.import_module("triton.language")

    class Platform:
        @staticmethod
        def is_cuda() -> bool:
            return torch.cuda.is_available()

    contents: dict[str, dict[str, object]] = {
        "vllm": {},
        "vllm.platforms": {"current_platform": Platform},
        "vllm.triton_utils": {"tl": language, "triton": triton},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.utils": {"PAD_SLOT_ID": -1},
    }
    modules = {}
    for name, attributes in contents.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(attributes)
    return modules
