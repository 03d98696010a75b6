"""PrefixCache: row snapshots by token prefix, version and salt; least recently used go first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from m1serve.engine.slots import RowSnapshot
from m1serve.engine.token_ids import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Prefixes are shared within one version and salt only."""

    weights_version: str
    salt: str


@dataclass(frozen=True, slots=True)
class _Key:
    space: Space
    num_tokens: int
    fingerprint: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    ids: NDArray[np.int32]
    snapshot: RowSnapshot

    @property
    def num_bytes(self) -> int:
        return self.snapshot.state_bytes + self.ids.nbytes


class PrefixCache:
    """Owned by the step thread. Holds the snapshots that it was given until they make room."""

    def __init__(self, max_bytes: int) -> None:
        """Of states and ids; pages are counted where they lie, and given up when they run out."""
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._lengths: dict[Space, Counter[int]] = {}
        self._pages: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_enabled(self) -> bool:
        return self._max_bytes > 0

    def find(self, space: Space, ids: TokenIds) -> RowSnapshot | None:
        """Of the longest stored prefix that leaves at least one token of `ids` to be read."""
        lengths = self._lengths.get(space, Counter())
        for length in sorted((n for n in lengths if n < len(ids)), reverse=True):
            key = _Key(space, length, ids.fingerprint(length))
            entry = self._entries.get(key)
            if entry is not None and ids.has_prefix(entry.ids):
                self._entries.move_to_end(key)
                return entry.snapshot
        return None

    def wants(self, space: Space, ids: TokenIds, num_tokens: int) -> bool:
        """False when the prefix is stored (and then counts as used) or nothing is kept at all."""
        if not self.is_enabled:
            return False
        key = _Key(space, num_tokens, ids.fingerprint(num_tokens))
        if key not in self._entries:
            return True
        self._entries.move_to_end(key)
        return False

    def put(self, space: Space, ids: TokenIds, snapshot: RowSnapshot) -> None:
        """Of the first tokens of `ids`, as many as the snapshot has; nothing if it is too large."""
        length = snapshot.num_tokens
        key = _Key(space, length, ids.fingerprint(length))
        # a view would keep all of a long prompt for its beginning
        own = ids.array if length == len(ids) else ids.array[:length].copy()
        entry = _Entry(ids=own, snapshot=snapshot)
        if entry.num_bytes > self._max_bytes:
            return
        snapshot.hold()
        self._remove(key)
        self._entries[key] = entry
        self._lengths.setdefault(space, Counter())[length] += 1
        self._count(entry, 1)
        while self.num_bytes > self._max_bytes:
            self.evict_oldest()

    def num_reclaimable(self, holders: list[int]) -> int:
        """Pages that nobody holds but snapshots that nobody else holds."""
        kept = {
            page
            for entry in self._entries.values()
            if entry.snapshot.num_holders > 1
            for page in entry.snapshot.pages
        }
        return sum(
            holders[page] == count and page not in kept for page, count in self._pages.items()
        )

    def evict_oldest(self) -> bool:
        """False: there is nothing left."""
        if not self._entries:
            return False
        self._remove(next(iter(self._entries)))
        return True

    def drop_version(self, weights_version: str) -> None:
        for key in [k for k in self._entries if k.space.weights_version == weights_version]:
            self._remove(key)

    def _remove(self, key: _Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._count(entry, -1)
        entry.snapshot.release()
        lengths = self._lengths[key.space]
        lengths[key.num_tokens] -= 1
        if lengths[key.num_tokens] == 0:
            del lengths[key.num_tokens]
        if not lengths:
            del self._lengths[key.space]

    def _count(self, entry: _Entry, sign: int) -> None:
        self.num_bytes += sign * entry.num_bytes
        for page in entry.snapshot.pages:
            self._pages[page] += sign
            if self._pages[page] == 0:
                del self._pages[page]
