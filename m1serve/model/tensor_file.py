"""What a safetensors file holds, and the digest of each tensor, read without torch."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path

from m1serve.errors import WeightsError

# safetensors' own limit
_MAX_HEADER_BYTES = 100_000_000
ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2}
ITEM_BYTES |= {"BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}
"""Of one element; a file with any other dtype is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    dtype: str
    """As safetensors spells it: F32, BF16, U8 ..."""
    shape: tuple[int, ...]
    start: int
    """Of its bytes in the file"""
    end: int


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """name -> where it lies, read from the header alone.

    WeightsError for a missing, truncated or foreign file, and for one whose tensors do not fill it
    exactly.
    """
    try:
        num_bytes = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            header = stream.read(header_bytes) if header_bytes <= _MAX_HEADER_BYTES else b""
    except FileNotFoundError as error:
        raise WeightsError(f"{file} is missing; fetch the checkpoint again") from error
    except OSError as error:
        raise WeightsError(f"cannot read {file} ({error.strerror}); fetch it again") from error
    try:
        tensors = {
            name: _stored(entry, 8 + header_bytes)
            for name, entry in json.loads(header).items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"{file} is truncated or not safetensors ({error!r}); fetch it again"
        ) from error
    _check_layout(file, tensors, 8 + header_bytes, num_bytes)
    return tensors


def _stored(entry: dict[str, object], data_start: int) -> StoredTensor:
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not (isinstance(shape, list) and isinstance(offsets, list)):
        raise TypeError(entry)
    start, end = offsets
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError(entry)
    return StoredTensor(
        dtype=str(entry["dtype"]),
        shape=tuple(shape),
        start=data_start + start,
        end=data_start + end,
    )


def _check_layout(
    file: Path, tensors: dict[str, StoredTensor], data_start: int, num_bytes: int
) -> None:
    """Each tensor has its bytes, one after the other, up to the end of the file."""
    place = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.dtype not in ITEM_BYTES:
            raise WeightsError(
                f"{name} in {file} has dtype {tensor.dtype}, known are {sorted(ITEM_BYTES)}; "
                "fetch the checkpoint in bf16"
            )
        wanted = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        if tensor.start != place or tensor.end - tensor.start != wanted:
            raise WeightsError(
                f"{file} is not safetensors: {name} lies at {tensor.start} to {tensor.end}, wanted "
                f"{place} to {place + wanted} for {tensor.dtype} {list(tensor.shape)}; fetch it "
                "again"
            )
        place = tensor.end
    if num_bytes != place:
        what = "is truncated" if num_bytes < place else "has bytes behind its tensors"
        raise WeightsError(f"{file} {what}: {num_bytes} of {place} bytes; fetch it again")


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
