"""Token streams as compact bytes: ids are little-endian int32, logprobs float32, flags one byte
each.

A leading byte says whether zstd was worth it; float32 logprobs hardly shrink and are mostly kept
raw.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import zstandard

from m1serve.errors import StoreError

_RAW, _ZSTD = b"\x00", b"\x01"
_LEVEL = 1
_WORTH_BYTES = 64


def pack_ids(ids: Sequence[int]) -> bytes:
    return _squeeze(ids_to_bytes(ids))


def unpack_ids(blob: bytes) -> tuple[int, ...]:
    return bytes_to_ids(_expand(blob))


def pack_floats(values: Sequence[float]) -> bytes:
    return _squeeze(floats_to_bytes(values))


def unpack_floats(blob: bytes) -> tuple[float, ...]:
    return bytes_to_floats(_expand(blob))


def pack_flags(flags: Sequence[int]) -> bytes:
    return _squeeze(bytes(flags))


def unpack_flags(blob: bytes) -> tuple[int, ...]:
    return tuple(_expand(blob))


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def bytes_to_ids(raw: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(raw) // 4}i", raw)


def floats_to_bytes(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def bytes_to_floats(raw: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(raw) // 4}f", raw)


def _squeeze(raw: bytes) -> bytes:
    if len(raw) >= _WORTH_BYTES:
        packed = zstandard.compress(raw, _LEVEL)
        if len(packed) < 0.9 * len(raw):
            return _ZSTD + packed
    return _RAW + raw


def _expand(blob: bytes) -> bytes:
    codec, body = blob[:1], blob[1:]
    if codec == _RAW:
        return body
    if codec == _ZSTD:
        return zstandard.decompress(body)
    raise StoreError(f"blob starts with {codec!r}, not a codec this code knows; was it truncated?")
