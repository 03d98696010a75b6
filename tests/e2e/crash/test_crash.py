"""SIGKILL to every role of a real `m1serve up` while clients talk to it and it trains.

What must hold afterwards is read from outside: database, version directories, processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from m1serve.chat.reply import ReplyParser, without_stop
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.errors import StoreError
from m1serve.model.weights import verify_version
from m1serve.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SEED = 7


async def keep_training(product: Any, killing: asyncio.Task[Any]) -> None:
    """There is a run asked for until the killing is over."""
    while not killing.done():
        sql = "SELECT count(*) FROM runs WHERE finished_at IS NULL"
        if product.one(sql) == 0:
            try:
                await asyncio.to_thread(product.retrain)
            except Exception:  # noqa: BLE001 - the admin routes die with their server
                await asyncio.sleep(0.5)
        await asyncio.sleep(0.2)


def settle(product: Any) -> None:
    """Until everything that was begun has come to its end."""
    product.wait_until(product.is_serving, 60, "serving")
    product.wait_until(lambda: is_ingested(product), 30, "the journal is read")
    for sql in (
        "SELECT count(*) = 0 FROM runs WHERE finished_at IS NULL",
        "SELECT count(*) = 0 FROM sessions WHERE closed_at IS NULL",
        "SELECT count(*) = 0 FROM jobs WHERE state NOT IN ('done', 'dead')",
        "SELECT count(*) = 1 FROM deployments JOIN targets USING (weights_version)",
    ):
        product.wait_until(lambda sql=sql: product.one(sql), 60, sql)
    product.wait_until(lambda: len(list((product.home / "journal").iterdir())) == 1, 10, "journal")


def is_ingested(product: Any) -> bool:
    """The sidecar has read every journal to its end."""
    sql = "SELECT segment, offset FROM journal_cursors WHERE writer = ?"
    for folder in (product.home / "journal").iterdir():
        for file in sorted(folder.glob("*.seg"))[-1:]:
            # a file that is gone was read
            is_left = file.exists() and [(int(file.stem), file.stat().st_size)]
            if is_left and product.rows(sql, folder.name) != is_left:
                return False
    return True


def check_turns(product: Any, received: list[Any]) -> None:
    """Every answer that arrived whole is kept, once, as it arrived."""
    tok = ChatTokenizer.load(product.home.parent / "model")
    store = Store.open(f"sqlite:///{product.home / 'm1serve.db'}", migrate=False)
    missing = []
    for seen in received:
        try:
            turn = store.ledger.turn(seen.turn_id)
        except StoreError:
            missing.append(seen)
            continue
        assert (turn.session_id, turn.completion_ids) == (seen.session_id, seen.token_ids)
        parser = ReplyParser(parse_calls=False)
        parser.push(tok.decode(without_stop(turn.completion_ids, turn.stop, tok.eos_id)))
        parser.finish()
        assert parser.parsed().content == seen.content
    store.close()
    assert missing == []
    sql = "SELECT request_id, choice FROM turns GROUP BY 1, 2 HAVING count(*) > 1"
    assert product.rows(sql) == []


def check_training(product: Any, received: list[Any]) -> None:
    """Nothing was trained twice, nothing that no client has seen."""
    trained = product.rows(
        "SELECT trajectory_id, turn_id, t.state, mode FROM run_trajectories "
        "JOIN trajectories t USING (trajectory_id) JOIN trajectory_turns USING (trajectory_id) "
        "WHERE role = 'train' AND NOT is_context"
    )
    assert trained != []
    assert max(Counter(turn_id for _, turn_id, _, _ in trained).values()) == 1
    assert {state for _, _, state, _ in trained} <= {"consumed", "burned"}
    assert {mode for _, _, _, mode in trained} == {"train"}
    assert {turn_id for _, turn_id, _, _ in trained} <= {turn.turn_id for turn in received}
    assert (
        product.rows(
            "SELECT run_id FROM runs LEFT JOIN run_trajectories USING (run_id) "
            "WHERE weights_version IS NOT NULL "
            "GROUP BY 1 HAVING count(trajectory_id) != num_claimed"
        )
        == []
    )
    held = "SELECT count(*) FROM trajectories WHERE state = 'claimed'"
    assert product.one(held) == 0


def check_versions(product: Any) -> None:
    """One chain, one version a committed run, directories that are what they were written as; a
    rejected version has none.
    """
    rows = product.rows("SELECT weights_version, number, path, parent, run_id, state FROM weights")
    versions = {row[0]: row for row in rows}
    assert sorted(row[1] for row in rows) == list(range(len(rows)))
    runs = dict(product.rows("SELECT run_id, weights_version FROM runs WHERE state = 'promoted'"))
    for name, number, path, parent, run_id, state in rows:
        assert str(product.home / "weights" / "nano" / str(number)) == path
        if state != "rejected":
            manifest = verify_version(Path(path))
            assert manifest.weights_version == name
            assert (manifest.parent, manifest.run_id) == (parent, run_id)
        assert (parent is None) == (number == 0)
        assert (runs.get(run_id) == name) == (state in ("active", "retired") and number > 0)
    (active,) = (name for name, *_, state in rows if state == "active")
    chain = [active]
    while (parent := versions[chain[-1]][3]) is not None:
        chain.append(parent)
    assert {versions[name][5] for name in chain[1:]} == {"retired"}
    assert chain[-1] == "nano@0"
    folder = product.home / "weights" / "nano"
    assert {path.name for path in folder.iterdir()} == {
        str(row[1]) for row in rows if row[5] != "rejected"
    }


def check_acknowledged(product: Any, players: Any) -> None:
    """No lease is left, and what was acknowledged is there."""
    assert product.one("SELECT count(*) FROM jobs WHERE token IS NOT NULL") == 0
    assert product.one("SELECT count(*) FROM runs WHERE token IS NOT NULL") == 0
    kept = {row[0] for row in product.rows("SELECT feedback_id FROM feedback")}
    assert players.feedback_ids <= kept
    closed = "SELECT session_id FROM sessions WHERE closed_at IS NOT NULL"
    assert players.ended_sessions <= {row[0] for row in product.rows(closed)}


async def ask(product: Any) -> str:
    async with openai.AsyncOpenAI(base_url=f"{product.url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(
            model="nano", messages=[{"role": "user", "content": "hello"}]
        )
    return str(answer.system_fingerprint)


async def test_no_kill_loses_a_turn_or_trains_one_twice(
    start_up: Any, make_players: Any, make_killer: Any
) -> None:
    with start_up("--no-ray") as product:
        players = make_players(product, SEED)
        killer = make_killer(product, players)
        playing = asyncio.create_task(players.play(concurrency=3))
        killing = asyncio.gather(
            asyncio.to_thread(killer.kill_servers, 5),
            asyncio.to_thread(killer.kill_at_random, "worker", 5),
            asyncio.to_thread(killer.kill_at_random, "sidecar", 5),
            asyncio.to_thread(killer.kill_trainers_at_work),
        )
        await keep_training(product, killing)
        await killing
        players.is_over = True
        await playing
        await asyncio.to_thread(settle, product)
        assert Counter(role for role, _ in killer.killed) == {
            "server": 5,
            "worker": 5,
            "sidecar": 5,
            "trainer": 5,
        }
        # nothing ended that was not killed
        restarts = json.loads((product.home / "run" / "restarts.json").read_text())
        assert restarts == Counter(role for role, _ in killer.killed)
        phases = {phase for role, phase in killer.killed if role == "trainer"}
        assert phases >= {"train", "gate"}, killer.killed
        assert phases & {"write", "commit"}, killer.killed
        assert players.num_failures > 0

        # one more run, undisturbed: it cleans up after those that were killed while writing
        players.is_over = False
        await players.play(concurrency=3, num_groups=12)
        await asyncio.to_thread(settle, product)
        run_id = await asyncio.to_thread(product.retrain)
        await asyncio.to_thread(settle, product)
        sql = "SELECT state, weights_version FROM runs WHERE run_id = ?"
        ((state, weights_version),) = product.rows(sql, run_id)
        assert state == "promoted"
        assert await ask(product) == weights_version

        check_turns(product, players.received)
        check_training(product, players.received)
        check_versions(product)
        check_acknowledged(product, players)
        below = product.descendants()
        product.process.send_signal(signal.SIGTERM)
        assert product.process.wait(60) == 0
        assert [process for process in below if process.is_alive] == []


async def test_with_ray_no_kill_loses_a_turn_either(
    start_up: Any, make_players: Any, make_killer: Any
) -> None:
    with start_up() as product:
        players = make_players(product, SEED)
        playing = asyncio.create_task(players.play(concurrency=3))
        killer = make_killer(product, players)
        await asyncio.to_thread(kill_what_ray_runs, killer)
        players.is_over = True
        await playing
        await asyncio.to_thread(settle, product)
        assert players.num_failures > 0
        check_turns(product, players.received)
        check_acknowledged(product, players)
        below = product.descendants()
        product.process.send_signal(signal.SIGTERM)
        assert product.process.wait(60) == 0
        assert [process for process in below if process.is_alive] == []


def kill_what_ray_runs(killer: Any) -> None:
    """The process that answers, the one with the engine, and the one that started them."""
    product = killer.product
    for name in ("ingress", "engine"):
        await_answers(killer)
        (replica,) = product.named(f"ray::ServeReplica:m1serve:{name}")
        os.kill(replica.pid, signal.SIGKILL)
        await_answers(killer)
        assert not replica.is_alive
    before = product.named("ray::")
    killer.see_it_restart("server", killer.strike("server"))
    gone = lambda: not any(process.is_alive for process in before)  # noqa: E731
    product.wait_until(gone, 5, "Ray's processes end")
    product.wait_until(product.is_serving, 90, "serving again")


def await_answers(killer: Any) -> None:
    num = len(killer.players.received)
    killer.product.wait_until(lambda: len(killer.players.received) > num + 5, 60, "answers")
