"""An open journal segment. One thread writes it, another may sync it meanwhile."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from m1serve.store.segments import MAGIC, sync_dir

_log = logging.getLogger(__name__)


class SegmentFile:
    """`num_bytes` of it are whole frames."""

    def __init__(
        self, path: Path, descriptor: int, write: Callable[[int, memoryview], int]
    ) -> None:
        self.path = path
        self._fd = descriptor
        self._write = write
        self.num_bytes = 0
        self.is_broken = False
        """The disk did not take what was written: nothing more belongs in here."""

    @classmethod
    def create(cls, path: Path, write: Callable[[int, memoryview], int]) -> SegmentFile:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        segment = cls(path, descriptor, write)
        try:
            segment.append(MAGIC)
            sync_dir(path.parent)
        except OSError:
            segment.cut_back()
            segment.close()
            raise
        return segment

    def append(self, data: bytes) -> None:
        """When this returns, the bytes outlive the process; the machine only after `sync`."""
        view = memoryview(data)
        while view:
            view = view[self._write(self._fd, view) :]
        self.num_bytes += len(data)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def cut_back(self) -> None:
        """To whole frames, after a write that failed half-way."""
        try:
            if self.num_bytes <= len(MAGIC):
                self.path.unlink(missing_ok=True)
            else:
                os.ftruncate(self._fd, self.num_bytes)
        except OSError as error:
            _log.error("journal segment %s keeps a torn tail: %s", self.path, error)

    def close(self) -> None:
        """What is in it was synced before, or counted as dropped."""
        try:
            os.close(self._fd)
        except OSError as error:
            _log.warning("journal segment %s not closed cleanly: %s", self.path, error)
