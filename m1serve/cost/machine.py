"""GPUs, their price, and how long FLOPs and bytes take at assumed shares of their peaks."""

from __future__ import annotations

from dataclasses import dataclass

from m1serve.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    flops_per_s: float
    """Dense bf16 matrix products; 8-bit weights are taken to be multiplied in bf16 too."""


H200 = Gpu(name="H200", memory_bytes=141e9, bandwidth_bytes_per_s=4.8e12, flops_per_s=989e12)
H800 = Gpu(name="H800", memory_bytes=80e9, bandwidth_bytes_per_s=3.35e12, flops_per_s=989e12)
H20 = Gpu(name="H20", memory_bytes=96e9, bandwidth_bytes_per_s=4.0e12, flops_per_s=148e12)
GPUS = {gpu.name.lower(): gpu for gpu in (H200, H800, H20)}
"""Their makers' figures; nothing here was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The GPUs that hold one copy of a model, and how well they are used: all of it assumptions."""

    gpu: Gpu
    num_gpus: int
    price_per_gpu_hour: float
    """Dollars."""
    mfu: float = 0.4
    """Share of the peak FLOP/s in prefill, training, and decode where it is bound by FLOPs."""
    bandwidth_share: float = 0.7
    """Share of the peak bandwidth in decode."""
    memory_share: float = 0.92
    """Share of the memory for weights, states and caches; the rest is everything else's."""

    def __post_init__(self) -> None:
        for name in ("mfu", "bandwidth_share", "memory_share"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ConfigError(f"{name} is {value}; wanted a share above 0 and up to 1")
        if self.num_gpus < 1:
            raise ConfigError(f"{self.num_gpus} GPUs; wanted at least 1")
        if not 0 <= self.price_per_gpu_hour < float("inf"):
            raise ConfigError(f"a price of {self.price_per_gpu_hour} $ per GPU-hour; wanted 0 up")

    @property
    def room_bytes(self) -> float:
        return self.num_gpus * self.gpu.memory_bytes * self.memory_share

    def seconds(self, *, flops: float, moved_bytes: float) -> float:
        """The roofline: whichever takes longer, FLOPs or bytes, over all GPUs at their shares."""
        return max(self._flops_s(flops), self._bytes_s(moved_bytes))

    def is_bound_by_bytes(self, *, flops: float, moved_bytes: float) -> bool:
        return self._bytes_s(moved_bytes) > self._flops_s(flops)

    def gpu_hours(self, seconds: float) -> float:
        return seconds * self.num_gpus / 3600

    def dollars(self, seconds: float) -> float:
        return self.gpu_hours(seconds) * self.price_per_gpu_hour

    def _flops_s(self, flops: float) -> float:
        return flops / (self.num_gpus * self.gpu.flops_per_s * self.mfu)

    def _bytes_s(self, moved_bytes: float) -> float:
        peak = self.num_gpus * self.gpu.bandwidth_bytes_per_s
        return moved_bytes / (peak * self.bandwidth_share)
