"""PrefixCache: row snapshots by token prefix, version and salt; least recently used go first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from m1serve.engine.slots import RowSnapshot

_MULTIPLIER = 0x9E3779B97F4A7C15
"""Odd, so its powers never vanish modulo 2**64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Prefixes are shared within one version and salt only."""

    weights_version: str
    salt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    num_tokens: int
    snapshot: RowSnapshot


@dataclass(frozen=True, slots=True)
class _Key:
    space: Space
    num_tokens: int
    fingerprint: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    ids: tuple[int, ...]
    snapshot: RowSnapshot
    num_bytes: int


class PrefixCache:
    """Fingerprints find candidates, equality of ids decides. Owned by the step thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._lengths: dict[Space, Counter[int]] = {}
        self._powers = np.ones(1, dtype=np.uint64)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_enabled(self) -> bool:
        return self._max_bytes > 0

    def find(self, space: Space, ids: tuple[int, ...]) -> Hit | None:
        """The longest stored prefix that leaves at least one token of `ids` to be read."""
        lengths = self._lengths.get(space)
        if not lengths:
            return None
        prints = self._fingerprints(ids)
        for length in sorted((n for n in lengths if n < len(ids)), reverse=True):
            key = _Key(space, length, int(prints[length - 1]))
            entry = self._entries.get(key)
            if entry is not None and entry.ids == ids[:length]:
                self._entries.move_to_end(key)
                return Hit(num_tokens=length, snapshot=entry.snapshot)
        return None

    def wants(self, space: Space, ids: tuple[int, ...]) -> bool:
        """False when it is stored already (which then counts as used) or nothing is kept at all."""
        if not self.is_enabled:
            return False
        key = self._key(space, ids)
        if key not in self._entries:
            return True
        self._entries.move_to_end(key)
        return False

    def put(self, space: Space, ids: tuple[int, ...], snapshot: RowSnapshot) -> None:
        key = self._key(space, ids)
        # a Python int takes 8 bytes of the tuple; small ids are shared objects
        entry = _Entry(ids=ids, snapshot=snapshot, num_bytes=snapshot.num_bytes + 8 * len(ids))
        self._remove(key)
        self._entries[key] = entry
        self._lengths.setdefault(space, Counter())[len(ids)] += 1
        self.num_bytes += entry.num_bytes
        while self.num_bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))

    def drop_version(self, weights_version: str) -> None:
        for key in [k for k in self._entries if k.space.weights_version == weights_version]:
            self._remove(key)

    def _remove(self, key: _Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self.num_bytes -= entry.num_bytes
        lengths = self._lengths[key.space]
        lengths[key.num_tokens] -= 1
        if lengths[key.num_tokens] == 0:
            del lengths[key.num_tokens]
        if not lengths:
            del self._lengths[key.space]

    def _key(self, space: Space, ids: tuple[int, ...]) -> _Key:
        return _Key(space, len(ids), int(self._fingerprints(ids)[-1]))

    def _fingerprints(self, ids: tuple[int, ...]) -> NDArray[np.uint64]:
        """Of every prefix at once: sum of (id + 1) * multiplier**position modulo 2**64."""
        if len(ids) > len(self._powers):
            steps = np.full(2 * len(ids), _MULTIPLIER, dtype=np.uint64)
            steps[0] = 1
            self._powers = np.cumprod(steps, dtype=np.uint64)
        terms = (np.asarray(ids, dtype=np.uint64) + np.uint64(1)) * self._powers[: len(ids)]
        return np.cumsum(terms, dtype=np.uint64)
