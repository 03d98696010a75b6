"""Prompts as content-addressed blocks of 1,024 ids at absolute positions, plus a tail.

A block's name is an HMAC under the tenant's key: equal prompts of one tenant share blocks, and
nobody without the key can ask whether a tenant ever sent a given text.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from m1serve.errors import StoreError
from m1serve.store.blobs import bytes_to_ids, pack_ids, unpack_ids
from m1serve.store.tables import PromptBlockRow

BLOCK_TOKENS = 1024
_BLOCK_BYTES = 4 * BLOCK_TOKENS
_ID_BYTES = 32
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPrompt:
    block_ids: bytes
    blocks: Mapping[bytes, bytes]
    """Packed ids by block id."""
    tail: bytes


def tenant_secret(key: bytes, tenant_id: str) -> bytes:
    """Each tenant's own key, from the store's one."""
    return hmac.digest(key, b"m1serve tenant\0" + tenant_id.encode(), "sha256")


def split_prompt(secret: bytes, raw: bytes) -> SplitPrompt:
    """`raw` is the prompt as little-endian int32."""
    blocks: dict[bytes, bytes] = {}
    names: list[bytes] = []
    num_full = len(raw) // _BLOCK_BYTES
    for start in range(0, num_full * _BLOCK_BYTES, _BLOCK_BYTES):
        block = raw[start : start + _BLOCK_BYTES]
        name = hmac.digest(secret, block, "sha256")
        names.append(name)
        if name not in blocks:
            blocks[name] = pack_ids(bytes_to_ids(block))
    tail = pack_ids(bytes_to_ids(raw[num_full * _BLOCK_BYTES :]))
    return SplitPrompt(block_ids=b"".join(names), blocks=blocks, tail=tail)


def join_prompt(block_ids: bytes, tail: bytes, blocks: Mapping[bytes, bytes]) -> tuple[int, ...]:
    ids: list[int] = []
    for name in block_names(block_ids):
        if name not in blocks:
            raise StoreError(f"prompt block {name.hex()} is missing; was it erased?")
        ids += unpack_ids(blocks[name])
    ids += unpack_ids(tail)
    return tuple(ids)


def load_blocks(session: Session, block_ids: Iterable[bytes]) -> dict[bytes, bytes]:
    """Packed ids of every block that the given lists name."""
    names = sorted({name for ids in block_ids for name in block_names(ids)})
    found: dict[bytes, bytes] = {}
    for start in range(0, len(names), 500):
        query = select(PromptBlockRow.block_id, PromptBlockRow.ids)
        part = query.where(PromptBlockRow.block_id.in_(names[start : start + 500]))
        found.update({row[0]: row[1] for row in session.execute(part)})
    return found


def prefix_digests(secret: bytes, raw: bytes, lengths: Sequence[int]) -> dict[int, bytes]:
    """Digest of the first n ids for each n, in one pass; `lengths` ascend."""
    state = hmac.new(secret, digestmod="sha256")
    digests: dict[int, bytes] = {}
    done = 0
    for length in lengths:
        state.update(raw[4 * done : 4 * length])
        done = length
        digests[length] = state.copy().digest()[:_DIGEST_BYTES]
    return digests


def block_names(block_ids: bytes) -> list[bytes]:
    return [block_ids[i : i + _ID_BYTES] for i in range(0, len(block_ids), _ID_BYTES)]
