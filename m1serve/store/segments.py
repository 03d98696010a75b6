"""The journal on disk: <dir>/<writer>/<first seq>.seg files of framed records, and a lock that says
who lives.

Frame: length u32, crc32 u32, seq u64, payload; the crc covers seq and payload.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from m1serve.errors import StoreError

MAGIC = b"M1JRNL1\n"
_HEAD = struct.Struct("<IIQ")
_SEQ = struct.Struct("<Q")
_MAX_PAYLOAD_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Frame:
    seq: int
    payload: bytes
    end: int
    """Offset behind it in its segment."""


@dataclass(frozen=True, slots=True)
class Torn:
    """Bytes that are no whole frame: still being written, cut off by a crash, or damaged."""

    offset: int
    num_bytes: int


def frame(seq: int, payload: bytes) -> bytes:
    body = _SEQ.pack(seq) + payload
    return _HEAD.pack(len(payload), zlib.crc32(body), seq) + payload


def read_frames(path: Path, offset: int) -> Iterator[Frame | Torn]:
    """Whole frames from `offset` on; a `Torn` comes last when something else follows."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if offset == 0:
            if file.read(len(MAGIC)) != MAGIC:
                yield Torn(0, size)
                return
            offset = len(MAGIC)
        file.seek(offset)
        while offset < size:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                break
            length, crc, seq = _HEAD.unpack(head)
            payload = file.read(length) if length <= _MAX_PAYLOAD_BYTES else b""
            if len(payload) < length or zlib.crc32(_SEQ.pack(seq) + payload) != crc:
                break
            offset += _HEAD.size + length
            yield Frame(seq, payload, offset)
    if offset < size:
        yield Torn(offset, size - offset)


def segment_path(writer_dir: Path, first_seq: int) -> Path:
    return writer_dir / f"{first_seq:016d}.seg"


def segments_of(writer_dir: Path) -> list[tuple[int, Path]]:
    """(first seq, path), oldest first."""
    return sorted((int(path.stem), path) for path in writer_dir.glob("*.seg"))


def num_bytes(segment: Path) -> int:
    """0 for one that another reader deleted."""
    try:
        return segment.stat().st_size
    except FileNotFoundError:
        return 0


def writer_dirs(journal_dir: Path) -> list[Path]:
    if not journal_dir.is_dir():
        return []
    return sorted(p for p in journal_dir.iterdir() if p.is_dir() and not p.name.startswith("."))


def lock_writer(directory: Path) -> int:
    """Takes the lock that lives as long as the process; returns its descriptor."""
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def is_writer_alive(directory: Path) -> bool:
    try:
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def sync_dir(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create_writer_dir(directory: Path, writer: str) -> int:
    # locked before it appears under its name: a reader never takes a starting writer for a dead one
    aside = directory / f".{writer}"
    try:
        aside.mkdir(parents=True)
        descriptor = lock_writer(aside)
        aside.rename(directory / writer)
        sync_dir(directory)
    except OSError as error:
        raise StoreError(
            f"cannot start a journal in {directory / writer}: {error}; "
            "the directory must be writable and the writer id unused"
        ) from error
    return descriptor
