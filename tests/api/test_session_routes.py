"""Sessions by path, feedback in all its forms, and what a client may read back."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from m1serve.api import ledger_reader
from m1serve.errors import StoreError
from m1serve.store import Store, journal_room
from m1serve.store.journal import JournalWriter
from m1serve.store.records import FeedbackGiven, JournalEntry, SessionSource

HI = [{"role": "user", "content": "Hi"}]
BODY = {"model": "fake", "messages": HI}


@pytest.fixture
def http() -> Callable[[str], httpx.AsyncClient]:
    return lambda url: httpx.AsyncClient(verify=False, base_url=url)


async def test_every_route_is_also_under_a_session(serve: Any, http: Any) -> None:
    async with serve() as world, http(f"{world.url}/s/my%2Fsession/v1") as client:
        chat = await client.post("/chat/completions", json=BODY)
        models = await client.get("/models")
        [turn] = world.turns
    assert models.json()["data"][0]["id"] == "fake"
    assert (turn.session_id, turn.session_source) == ("my/session", SessionSource.NAMED)
    assert chat.headers["x-m1-session-id"] == "my/session"


async def test_a_header_wins_over_the_path_and_the_path_over_metadata(
    serve: Any, http: Any
) -> None:
    async with serve() as world, http(f"{world.url}/s/path") as client:
        body = {**BODY, "metadata": {"m1_session": "metadata"}}
        await client.post("/v1/chat/completions", json=body)
        headers = {"x-m1-session-id": "header"}
        await client.post("/v1/chat/completions", json=body, headers=headers)
        names = [turn.session_id for turn in world.turns]
    assert names == ["path", "header"]


async def test_a_path_that_names_no_session_is_refused_as_any(serve: Any, http: Any) -> None:
    async with serve() as world, http(world.url) as client:
        for path in ("/s//v1/models", "/s/v1/models"):
            assert (await client.get(path)).status_code == 404
        bad = await client.post("/s/a b/v1/chat/completions", json=BODY)
        strange = await client.post("/s/%C3%A9/v1/chat/completions", json=BODY)
    assert bad.status_code == 400
    assert "visible ASCII" in bad.json()["error"]["message"]
    assert strange.status_code == 200
    assert strange.headers["x-m1-session-id"] == "\\xe9"


async def test_feedback_names_a_turn_a_completion_or_a_session(serve: Any, http: Any) -> None:
    async with serve() as world, http(world.url) as client:
        answer = (await client.post("/v1/chat/completions", json=BODY)).json()
        [turn] = world.turns
        for target in (
            {"completion_id": answer["id"]},
            {"turn_id": turn.turn_id},
            {"session_id": turn.session_id},
        ):
            given = {**target, "value": 0.5, "metric": "thumb", "source": "judge"}
            assert (await client.post("/v1/feedback", json=given)).status_code == 200
        refused = [
            await client.post("/v1/feedback", json={"value": 1, **target})
            for target in (
                {},
                {"completion_id": "x"},
                {"completion_id": "cmpl-x", "turn_id": "t"},
            )
        ]
        said = [record for record in world.journal if isinstance(record, FeedbackGiven)]
    assert [r.status_code for r in refused] == [400, 400, 400]
    assert [(f.request_id, f.turn_id, f.session_id) for f in said] == [
        (turn.request_id, None, None),
        (None, turn.turn_id, None),
        (None, None, turn.session_id),
    ]
    assert {(f.metric, f.value, f.source) for f in said} == {("thumb", 0.5, "judge")}


async def test_feedback_that_is_sent_again_is_the_same_feedback(serve: Any, http: Any) -> None:
    up, down = {"session_id": "s", "value": 1.0}, {"session_id": "s", "value": 0.0}
    once = {"idempotency-key": "once"}
    async with serve() as world, http(world.url) as client:
        asks: list[tuple[Any, Any]] = [(up, {}), (up, {}), (down, {}), (up, once), (down, once)]
        asks.append(({**up, "idempotency_key": "once"}, {}))
        ids = [
            (await client.post("/v1/feedback", json=body, headers=headers)).json()["id"]
            for body, headers in asks
        ]
    assert ids[0] == ids[1] != ids[2]
    assert ids[3] == ids[4] == ids[5]
    assert len(set(ids)) == 3


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path / 'store.db'}")
    yield opened
    opened.close()


async def test_a_database_that_hangs_holds_up_nobody_else(
    serve: Any, http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even bodies that are parsed in threads."""
    monkeypatch.setattr(ledger_reader, "READ_S", 0.2)
    is_back = threading.Event()

    def hang() -> Store:
        is_back.wait(30)
        raise StoreError("away")

    large = {"model": "fake", "messages": [{"role": "user", "content": "x" * 100_000}]}
    try:
        async with serve(open_store=hang) as world, http(world.url) as client:
            reads = [
                asyncio.create_task(client.get("/v1/sessions/s", timeout=20)) for _ in range(4)
            ]
            answer = await client.post("/v1/chat/completions", json=large, timeout=20)
            assert answer.status_code != 503
            read = await asyncio.gather(*reads)
            is_back.set()
    finally:
        is_back.set()
    assert {r.status_code for r in read} == {503}
    assert "did not answer" in read[0].text


async def test_feedback_that_a_full_journal_drops_is_not_acknowledged(
    serve: Any, http: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_room, "_SMALL_BYTES", 1)
    journal = JournalWriter(tmp_path / "journal", max_bytes=1)
    async with serve(into=journal) as world, http(world.url) as client:
        refused = await client.post("/v1/feedback", json={"session_id": "s", "value": 1})
    journal.close()
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert "x-should-retry" not in refused.headers


async def test_a_session_is_read_back_with_turns_drift_rewards_and_flags(
    serve: Any, http: Any, store: Store, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    async with (
        serve(open_store=partial(Store.open, url, migrate=False)) as world,
        http(f"{world.url}/s/s1") as client,
    ):
        await client.post("/v1/chat/completions", json=BODY)
        more = [{"role": "assistant", "content": "Hello."}, *HI]
        await client.post("/v1/chat/completions", json={**BODY, "messages": [*HI, *more]})
        await client.post("/v1/feedback", json={"session_id": "s1", "value": 0.25})
        await client.post("/v1/sessions/s1/end")
        missing = await client.get("/v1/sessions/s1")
        store.ledger.ingest(
            [JournalEntry(writer="w", seq=i, record=r) for i, r in enumerate(world.journal)]
        )
        found = (await client.get("/v1/sessions/s1")).json()
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "session_not_found")
    assert (found["id"], found["object"], found["close_reason"]) == ("s1", "session", "end")
    assert [turn["drift"] for turn in found["turns"]] == ["root", "extend"]
    assert [turn["session_source"] for turn in found["turns"]] == ["named", "named"]
    assert found["turns"][0]["weights_versions"] == ["fake@0"]
    assert (found["is_incomplete"], found["is_ambiguous"], found["erased_at"]) == (
        False,
        False,
        None,
    )
    [trajectory] = found["trajectories"]
    assert (trajectory["reward"], trajectory["state"]) == (0.25, "eligible")
    assert trajectory["rewards"][0]["scorer"] == "feedback"
    assert [f["value"] for f in found["feedback"]] == [0.25]
    assert "completion_ids" not in json.dumps(found)


@pytest.mark.parametrize("history", ["exact", "template"])
async def test_a_retry_is_no_second_step(
    serve: Any, http: Any, store: Store, eventually: Any, history: str
) -> None:
    """The first attempt at the second turn times out; the client declares its retry."""
    model = {"model_id": "fake", "history": history}
    more = [*HI, {"role": "assistant", "content": "Hello."}, *HI]
    async with serve(model=model) as world, http(world.url) as client:
        await client.post("/v1/chat/completions", json=BODY)
        world.engine.delay_s = 0.2
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json={**BODY, "messages": more}, timeout=0.1)
        await eventually(lambda: len(world.turns) == 2)
        world.engine.delay_s = 0.0
        retried = await client.post(
            "/v1/chat/completions",
            json={**BODY, "messages": more},
            headers={"x-stainless-retry-count": "1"},
        )
        first, lost, retry = world.turns
        entries = [JournalEntry(writer="w", seq=i, record=r) for i, r in enumerate(world.journal)]
        store.ledger.ingest(entries)
    assert retried.status_code == 200
    assert {lost.session_id, retry.session_id} == {first.session_id}
    assert retry.session_source is SessionSource.RETRY
    store.ledger.close_idle_sessions(0.0, retry.created_at + 60)
    [trajectory] = store.ledger.list_trajectories()
    view = store.ledger.trajectory(trajectory.trajectory_id)
    assert [t.turn_id for t in view.turns] == [first.turn_id, retry.turn_id]


async def test_nothing_of_an_unstored_turn_is_kept_but_its_count(serve: Any, http: Any) -> None:
    async with serve() as world, http(world.url) as client:
        await client.post("/v1/chat/completions", json={**BODY, "store": False})
        page = (await client.get("/metrics")).text
        assert world.journal == []
    assert 'm1serve_turns_total{mode="off",stop="eos"} 1.0' in page
