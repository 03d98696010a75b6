from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m1serve.errors import StoreError
from m1serve.store.blobs import (
    pack_flags,
    pack_floats,
    pack_ids,
    unpack_flags,
    unpack_floats,
    unpack_ids,
)
from m1serve.store.prompts import BLOCK_TOKENS, join_prompt, prefix_digests, split_prompt

ids = st.lists(st.integers(0, 200_063), max_size=3000).map(tuple)
floats = st.lists(st.floats(width=32, allow_nan=False), max_size=300).map(tuple)
SECRET = b"secret"


@settings(deadline=None)
@given(ids)
def test_ids_come_back(values: tuple[int, ...]) -> None:
    assert unpack_ids(pack_ids(values)) == values


@settings(deadline=None)
@given(floats)
def test_float32_logprobs_come_back_to_the_bit(values: tuple[float, ...]) -> None:
    assert unpack_floats(pack_floats(values)) == values


@settings(deadline=None)
@given(st.lists(st.integers(0, 7), max_size=300).map(tuple))
def test_flags_come_back(values: tuple[int, ...]) -> None:
    assert unpack_flags(pack_flags(values)) == values


def test_repetitive_ids_are_compressed() -> None:
    assert len(pack_ids((7, 8, 9) * 1000)) < 500


def test_a_blob_of_an_unknown_codec_is_refused() -> None:
    with pytest.raises(StoreError, match="codec"):
        unpack_ids(b"\x09abc")


@pytest.mark.parametrize("num", [0, 1, 1023, 1024, 1025, 2048, 5000])
def test_a_prompt_comes_back_from_its_blocks_and_tail(num: int) -> None:
    prompt = tuple((7 * i) % 200_064 for i in range(num))
    split = split_prompt(SECRET, b"".join(i.to_bytes(4, "little") for i in prompt))
    assert len(split.block_ids) == 32 * (num // BLOCK_TOKENS)
    assert join_prompt(split.block_ids, split.tail, split.blocks) == prompt


def test_prompts_with_a_common_beginning_share_their_blocks() -> None:
    one = split_prompt(SECRET, bytes(range(256)) * 16 + b"tail")
    two = split_prompt(SECRET, bytes(range(256)) * 16 + b"more")
    assert one.block_ids == two.block_ids


def test_block_names_tell_nothing_without_the_tenants_key() -> None:
    raw = bytes(4 * BLOCK_TOKENS)
    assert split_prompt(b"a", raw).block_ids != split_prompt(b"b", raw).block_ids


def test_a_missing_block_is_named() -> None:
    split = split_prompt(SECRET, bytes(4 * BLOCK_TOKENS))
    with pytest.raises(StoreError, match=split.block_ids.hex()):
        join_prompt(split.block_ids, split.tail, {})


@settings(deadline=None)
@given(ids)
def test_prefix_digests_are_those_of_the_prefixes(values: tuple[int, ...]) -> None:
    raw = b"".join(i.to_bytes(4, "little") for i in values)
    lengths = sorted({0, len(values) // 2, len(values)})
    digests = prefix_digests(SECRET, raw, lengths)
    for length in lengths:
        assert digests[length] == prefix_digests(SECRET, raw[: 4 * length], [length])[length]
