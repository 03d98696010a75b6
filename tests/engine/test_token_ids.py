"""Fingerprints of prefixes, however the ids came together."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from m1serve.engine.token_ids import TokenIds

some_ids = st.lists(st.integers(0, 200_063), max_size=40)


@given(some_ids, some_ids)
def test_what_is_extended_equals_what_was_given_at_once(ids: list[int], more: list[int]) -> None:
    extended, whole = TokenIds.of(ids).extended(more), TokenIds.of(ids + more)
    assert extended.array.tolist() == ids + more
    prints = [[t.fingerprint(n) for n in range(len(whole) + 1)] for t in (extended, whole)]
    assert prints[0] == prints[1]


@given(some_ids, some_ids)
def test_prefixes_with_one_print_are_equal(ids: list[int], others: list[int]) -> None:
    one, other = TokenIds.of(ids), TokenIds.of(others)
    for n in range(min(len(ids), len(others)) + 1):
        assert (one.fingerprint(n) == other.fingerprint(n)) == (ids[:n] == others[:n])


def test_a_print_depends_on_the_order() -> None:
    assert TokenIds.of([1, 2]).fingerprint(2) != TokenIds.of([2, 1]).fingerprint(2)


def test_a_prefix_is_compared_by_its_ids() -> None:
    ids = TokenIds.of([5, 6, 7])
    assert ids.has_prefix(np.array([5, 6], dtype=np.int32))
    assert ids.has_prefix(np.array([], dtype=np.int32))
    assert not ids.has_prefix(np.array([5, 7], dtype=np.int32))
    assert not ids.has_prefix(np.array([5, 6, 7, 8], dtype=np.int32))
