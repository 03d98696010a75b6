"""What a safetensors file holds, and the digest of each tensor, read without torch."""

from __future__ import annotations

import hashlib
import json
import mmap
from dataclasses import dataclass
from pathlib import Path

from m1serve.errors import WeightsError

# safetensors' own limit
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    dtype: str
    """As safetensors spells it: F32, BF16, U8 ..."""
    shape: tuple[int, ...]
    start: int
    """Of its bytes in the file"""
    end: int


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """name -> where it lies; WeightsError for a missing, truncated or foreign file."""
    try:
        num_bytes = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            header = stream.read(header_bytes) if header_bytes <= _MAX_HEADER_BYTES else b""
    except OSError as error:
        raise WeightsError(f"cannot read {file} ({error.strerror}); fetch it again") from error
    try:
        tensors = {
            name: StoredTensor(
                dtype=str(entry["dtype"]),
                shape=tuple(entry["shape"]),
                start=8 + header_bytes + entry["data_offsets"][0],
                end=8 + header_bytes + entry["data_offsets"][1],
            )
            for name, entry in json.loads(header).items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise WeightsError(
            f"{file} is truncated or not safetensors ({error!r}); fetch it again"
        ) from error
    end = max((t.end for t in tensors.values()), default=8 + header_bytes)
    if num_bytes < end:
        raise WeightsError(f"{file} is truncated: {num_bytes} of {end} bytes; fetch it again")
    return tensors


def tensor_digests(file: Path) -> dict[str, str]:
    """name -> sha256 over dtype, shape and bytes."""
    tensors = stored_tensors(file)
    with (
        file.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as data,
    ):
        return {name: _digest(tensor, data) for name, tensor in tensors.items()}


def _digest(tensor: StoredTensor, data: memoryview) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    with data[tensor.start : tensor.end] as content:
        digest.update(content)
    return digest.hexdigest()
