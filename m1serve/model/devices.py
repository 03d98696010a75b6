"""The devices a model could run on, and how much of their memory is free now."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    name: str
    """cpu, cuda:0 ..."""
    model: str
    """NVIDIA H200, x86_64 ..."""
    free_bytes: int
    total_bytes: int

    @property
    def is_cuda(self) -> bool:
        return self.name.startswith("cuda")


def found_devices() -> tuple[Device, ...]:
    """Every CUDA device; the CPU only where there is none. Asking makes a CUDA context on each."""
    return tuple(_cuda(i) for i in range(torch.cuda.device_count())) or (_cpu(),)


def device_of(device: torch.device | str) -> Device | None:
    """The one that torch calls so; None for devices without a memory of their own (meta)."""
    asked = torch.device(device)
    if asked.type == "cuda":
        return _cuda(torch.cuda.current_device() if asked.index is None else asked.index)
    return _cpu() if asked.type == "cpu" else None


def _cuda(index: int) -> Device:
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    # what torch holds for this process and does not use is as good as free to it
    idle_bytes = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    return Device(
        name=f"cuda:{index}",
        model=torch.cuda.get_device_name(index),
        free_bytes=free_bytes + idle_bytes,
        total_bytes=total_bytes,
    )


def _cpu() -> Device:
    free_bytes, total_bytes = _host_memory()
    limit_bytes, used_bytes = _cgroup_memory()
    if limit_bytes is not None:
        total_bytes = min(total_bytes, limit_bytes)
        free_bytes = min(free_bytes, max(0, limit_bytes - used_bytes))
    return Device(
        name="cpu", model=platform.machine(), free_bytes=free_bytes, total_bytes=total_bytes
    )


def _host_memory() -> tuple[int, int]:
    """Free and total; where the system does not say what is free, everything is."""
    if not _MEMINFO.exists():
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    lines = (line.split() for line in _MEMINFO.read_text().splitlines())
    kib = {fields[0].rstrip(":"): int(fields[1]) for fields in lines}
    return kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024


def _cgroup_memory() -> tuple[int | None, int]:
    """Limit and use of a container; None where there is no limit. Cache that can go is not used."""
    file = _CGROUP / "memory.max"
    if not file.exists() or file.read_text().strip() == "max":
        return None, 0
    lines = (line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    cached = next((int(number) for name, number in lines if name == "inactive_file"), 0)
    return int(file.read_text()), int((_CGROUP / "memory.current").read_text()) - cached
