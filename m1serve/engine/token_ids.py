"""TokenIds: the ids of a prompt as one array, and a fingerprint of each of its prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MULTIPLIER = 0x9E3779B97F4A7C15
"""Odd, so its powers never vanish modulo 2**64."""
_MODULUS = 1 << 64


class TokenIds:
    """Immutable. Fingerprints find candidates for equality, the ids decide."""

    __slots__ = ("_prints", "array")

    def __init__(self, array: NDArray[np.int32], prints: NDArray[np.uint64] | None = None) -> None:
        self.array = array
        self._prints = _fingerprints(array, 0, 0) if prints is None else prints

    @classmethod
    def of(cls, ids: Sequence[int]) -> TokenIds:
        """About 60 ns a token: a million belong on a thread of their own."""
        return cls(np.asarray(ids, dtype=np.int32))

    def __len__(self) -> int:
        return len(self.array)

    @property
    def bounds(self) -> tuple[int, int]:
        """The lowest and the highest id; there must be one."""
        return int(self.array.min()), int(self.array.max())

    def fingerprint(self, num_tokens: int) -> int:
        """Of the first so many: sum of (id + 1) * multiplier**position modulo 2**64."""
        return int(self._prints[num_tokens - 1]) if num_tokens else 0

    def has_prefix(self, ids: NDArray[np.int32]) -> bool:
        return len(ids) <= len(self.array) and np.array_equal(self.array[: len(ids)], ids)

    def extended(self, ids: Sequence[int]) -> TokenIds:
        """These, then those."""
        if not ids:
            return self
        more = np.asarray(ids, dtype=np.int32)
        prints = _fingerprints(more, len(self), self.fingerprint(len(self)))
        return TokenIds(np.concatenate([self.array, more]), np.concatenate([self._prints, prints]))


def _fingerprints(ids: NDArray[np.int32], position: int, before: int) -> NDArray[np.uint64]:
    """Of all prefixes of ids that begin at a position, after a prefix with a print of its own."""
    powers = np.full(len(ids), _MULTIPLIER, dtype=np.uint64)
    powers[:1] = pow(_MULTIPLIER, position, _MODULUS)
    terms = (ids.astype(np.uint64) + np.uint64(1)) * np.cumprod(powers, dtype=np.uint64)
    return np.cumsum(terms, dtype=np.uint64) + np.uint64(before)
