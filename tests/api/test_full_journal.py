"""A journal that takes no more: answers go on, and what they belong to is never taken for whole."""

from pathlib import Path
from typing import Any

import pytest

from m1serve.store import Store
from m1serve.store.journal import JournalWriter
from m1serve.store.sidecar import Sidecar

HI: Any = [{"role": "user", "content": "Hi " * 300}]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_answers_go_on_and_their_sessions_are_incomplete(
    serve: Any, tmp_path: Path, is_stream: bool
) -> None:
    journal = JournalWriter(tmp_path / "journal", max_bytes=4000)
    async with serve(into=journal) as world:
        for number in range(10):
            answer = await world.client.chat.completions.create(
                model="fake",
                messages=[*HI, {"role": "user", "content": str(number)}],
                extra_headers={"x-m1-session-id": f"s{number}"},
                stream=is_stream,
            )
            if is_stream:
                chunks = [chunk async for chunk in answer]
                text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            else:
                text = answer.choices[0].message.content
            assert text == "Hello."
            await world.client.post(f"/sessions/s{number}/end", body={}, cast_to=object)
        page = (await world.client._client.get(f"{world.url}/metrics")).text
        num_dropped = journal.dropped
    journal.close()
    assert f"m1serve_capture_dropped_records {float(num_dropped)}" in page
    assert 0 < num_dropped < 10
    store = Store.open(f"sqlite:///{tmp_path / 'store.db'}")
    Sidecar(store, tmp_path / "journal").run_once()
    sessions = [store.ledger.session("default", f"s{number}") for number in range(10)]
    assert [s is not None for s in sessions] == [True] * 10
    assert sum(s.is_incomplete for s in sessions if s is not None) == num_dropped
    assert store.ledger.count_turns() == 10 - num_dropped
    store.close()
