"""A directory that appears whole or not at all: written aside, fsynced, renamed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from m1serve.errors import StoreError

_PREFIX = ".writing-"


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yields a temporary directory beside `target` that becomes `target` if the block succeeds.

    Otherwise it is removed; what a killed process left behind is removed by the next call.
    Raises StoreError when the target exists or the disk does not take the bytes.
    """
    if target.exists():
        raise StoreError(
            f"{target} exists; versions are never overwritten: take the next number, "
            "or discard_version it if no run committed it"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent)
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{target.name}-", dir=target.parent))
    except OSError as error:
        raise _cannot_write(target, error) from error
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # held for as long as the writer lives: an unlocked temporary directory has no owner
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
        folder.chmod(0o755)
        _fsync_tree(folder)
        folder.rename(target)
        _fsync(target.parent)
    except (OSError, SafetensorError) as error:
        raise _cannot_write(target, error) from error
    finally:
        os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)


def remove_whole(target: Path) -> None:
    """Removes a directory so that no half of it is ever seen under its name."""
    aside = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=target.parent))
    target.rename(aside / target.name)
    shutil.rmtree(aside)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


def _fsync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _fsync(path)
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot_write(target: Path, error: OSError | SafetensorError) -> StoreError:
    existing = next(path for path in target.parents if path.exists())
    free_mib = shutil.disk_usage(existing).free / 2**20
    return StoreError(
        f"could not write {target}: {error}; {free_mib:.0f} MiB are free there and nothing was "
        "left behind. Free space or move the weights directory, then run again"
    )
