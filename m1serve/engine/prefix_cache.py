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


class PrefixCache:
    """Owned by the step thread. Holds the snapshots that it was given until they make room."""

    def __init__(self, max_bytes: int, *, page_bytes: int) -> None:
        """`page_bytes` are of all layers; a page of several snapshots counts once."""
        self._max_bytes, self._page_bytes = max_bytes, page_bytes
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
        """Of the first tokens of `ids`, as many as the snapshot has."""
        length = snapshot.num_tokens
        key = _Key(space, length, ids.fingerprint(length))
        self._remove(key)
        entry = _Entry(ids=ids.array[:length], snapshot=snapshot.hold())
        self._entries[key] = entry
        self._lengths.setdefault(space, Counter())[length] += 1
        self._count(entry, 1)
        while self.num_bytes > self._max_bytes and self.evict_oldest():
            pass

    def num_reclaimable(self, holders: list[int]) -> int:
        """Pages that nobody but snapshots here holds."""
        return sum(holders[page] == count for page, count in self._pages.items())

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
        """Its bytes, and those of the pages that no other entry has."""
        self.num_bytes += sign * (entry.snapshot.state_bytes + entry.ids.nbytes)
        for page in entry.snapshot.pages:
            before = self._pages[page]
            self._pages[page] = before + sign
            if before == (0 if sign > 0 else 1):
                self.num_bytes += sign * self._page_bytes
            if self._pages[page] == 0:
                del self._pages[page]
