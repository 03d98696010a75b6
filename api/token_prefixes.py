"""Answers to text completions by their token ids: a prompt that begins with one goes on with it."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from m1serve.api.lookalikes import MAX_ALIKE, Answer


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """Token ids hashed once, so that an answer is added without reading them again."""

    scope: str
    num_ids: int
    _state: hashlib.blake2b = field(repr=False, compare=False)

    def with_answer(self, ids: Sequence[int]) -> TokenKey:
        state = self._state.copy()
        state.update(array("i", ids).tobytes())
        return self.scope, self.num_ids + len(ids), state.digest()


TokenKey = tuple[str, int, bytes]
"""Scope, length and digest of a prefix."""


class TokenPrefixes:
    """Not thread-safe by itself. A scope is a key and a model name."""

    def __init__(self) -> None:
        self._answers: dict[TokenKey, list[Answer]] = {}
        self._lengths: dict[str, Counter[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._answers.values()))

    def read(self, scope: str, ids: Sequence[int]) -> tuple[list[Answer], ReadPrompt]:
        """The answers whose prompt and completion the longest known prefix of `ids` is."""
        raw = array("i", ids)
        state = hashlib.blake2b(digest_size=16)
        found: list[Answer] = []
        done = 0
        for length in sorted(n for n in self._lengths.get(scope, ()) if n <= len(raw)):
            state.update(raw[done:length].tobytes())
            done = length
            found = self._answers.get((scope, length, state.digest()), found)
        state.update(raw[done:].tobytes())
        return list(found), ReadPrompt(scope, len(raw), state)

    def add(self, key: TokenKey, answer: Answer) -> None:
        alike = self._answers.setdefault(key, [])
        if len(alike) == MAX_ALIKE:
            self.drop(key, alike[0])
            alike = self._answers[key]
        alike.append(answer)
        self._lengths.setdefault(key[0], Counter())[key[1]] += 1

    def drop(self, key: TokenKey, answer: Answer) -> None:
        alike = self._answers.get(key, [])
        rest = [other for other in alike if other is not answer]
        if len(rest) == len(alike):
            # pushed out by lookalikes before
            return
        if rest:
            self._answers[key] = rest
        else:
            self._answers.pop(key, None)
        lengths = self._lengths[key[0]]
        lengths[key[1]] -= 1
        if lengths[key[1]] == 0:
            del lengths[key[1]]
        if not lengths:
            del self._lengths[key[0]]
