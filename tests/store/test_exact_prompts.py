"""Prompts of thousands of tokens come back as the engine saw them, whoever shares their blocks."""

from __future__ import annotations

import random
import uuid
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from m1serve.store import Store
from m1serve.store.prompts import BLOCK_TOKENS, block_names
from m1serve.store.tables import PromptBlockRow, TurnRow

VOCAB = 200_064
shapes = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        # how much of the common text it begins with, and how many tokens of its own follow
        st.one_of(
            st.integers(0, 6 * BLOCK_TOKENS),
            st.sampled_from([BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS]),
        ),
        st.integers(0, 3000),
        st.integers(0, 400),
    ),
    min_size=2,
    max_size=6,
)


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(shapes=shapes, seed=st.integers(0, 2**32 - 1), is_one_batch=st.booleans())
def test_any_prompt_comes_back_and_tenants_share_no_block(
    store: Store, recorder: Any, shapes: list[Any], seed: int, is_one_batch: bool
) -> None:
    rng = random.Random(seed)
    common = [rng.randrange(VOCAB) for _ in range(6 * BLOCK_TOKENS)]
    # tenants of this example alone: the store is shared by all of them
    suffix = uuid.uuid4().hex
    turns = [
        recorder.turn(
            [*common[:shared], *(rng.randrange(VOCAB) for _ in range(own))],
            [rng.randrange(VOCAB) for _ in range(sampled)],
            tenant_id=f"{tenant}-{suffix}",
            session_id=f"s{number % 3}",
        )
        for number, (tenant, shared, own, sampled) in enumerate(shapes)
    ]
    entries = recorder.entries(*turns)
    for batch in [entries] if is_one_batch else [[entry] for entry in entries]:
        store.ledger.ingest(batch)
    for turn in turns:
        assert store.ledger.turn(turn.turn_id) == turn
    for tenant_id in {turn.tenant_id for turn in turns}:
        prompts = [turn.prompt_ids for turn in turns if turn.tenant_id == tenant_id]
        blocks = {
            prompt[i : i + BLOCK_TOKENS]
            for prompt in prompts
            for i in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS)
        }
        assert named(store, tenant_id) == owned(store, tenant_id)
        assert len(owned(store, tenant_id)) == len(blocks)
    ids = [named(store, f"{tenant}-{suffix}") for tenant in "ab"]
    assert ids[0].isdisjoint(ids[1])


def named(store: Store, tenant_id: str) -> set[bytes]:
    """Blocks that turns of the tenant are made of."""
    with store._db.read() as session:
        query = select(TurnRow.prompt_blocks).where(TurnRow.tenant_id == tenant_id)
        return {name for ids in session.scalars(query) for name in block_names(ids)}


def owned(store: Store, tenant_id: str) -> set[bytes]:
    with store._db.read() as session:
        query = select(PromptBlockRow.block_id).where(PromptBlockRow.tenant_id == tenant_id)
        return set(session.scalars(query))
