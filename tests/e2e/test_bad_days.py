"""What goes wrong around a running product is refused with a reason, and the server goes on."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from m1serve.cli.lifeline import own_command
from m1serve.cli.ports import pick_free
from m1serve.model.manifest import read_manifest
from m1serve.store import Store
from m1serve.types import Slot, VersionState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SCORER = b"m1serve.online_rl.scorers.process"
FILE_BYTES = 6 * 2**20
"""More than the database and its log grow to, less than the trainer's state of the tiny model."""


@pytest.fixture(scope="module")
def product(start_up: Any) -> Iterator[Any]:
    with start_up("--no-ray") as running:
        yield running


@pytest.fixture
def store(product: Any) -> Iterator[Store]:
    with closing(Store.open(f"sqlite:///{product.home / 'm1serve.db'}", migrate=False)) as opened:
        yield opened


@pytest.fixture
def client(product: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{product.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def ask(client: openai.OpenAI, session_id: str | None = None, **labels: str) -> str:
    """The version that answered; the session is over."""
    session_id = session_id or uuid.uuid4().hex
    completion = client.chat.completions.create(
        model="nano",
        messages=[{"role": "user", "content": "hello"}],
        extra_headers={"X-M1-Session-Id": session_id, **labels},
    )
    client.post(f"/sessions/{session_id}/end", body={}, cast_to=object)
    return str(completion.system_fingerprint)


def test_up_without_its_database_says_what_to_do(tmp_path: Path) -> None:
    url = f"postgresql+psycopg://me:secret@127.0.0.1:{pick_free()}/m1serve"
    done = subprocess.run(
        own_command("up", "--home", str(tmp_path / "home"), "--set", f"database_url={url}"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "check database_url, that it is reachable" in done.stderr
    assert "secret" not in done.stderr
    assert list((tmp_path / "home" / "run").glob("*.pid")) == []


def test_answers_do_not_wait_for_a_database_that_is_held_up(
    product: Any, client: openai.OpenAI
) -> None:
    with closing(sqlite3.connect(product.home / "m1serve.db")) as holder:
        holder.execute("BEGIN IMMEDIATE")
        version = ask(client, "held-up")
        assert version.startswith("nano@")
        assert product.one("SELECT count(*) FROM turns WHERE session_id = 'held-up'") == 0
    sql = "SELECT count(*) FROM turns WHERE session_id = 'held-up'"
    product.wait_until(lambda: product.one(sql) == 1, 40, "ingested")


def test_damaged_weights_are_refused_and_the_old_serve_on(
    product: Any, store: Store, client: openai.OpenAI
) -> None:
    good = store.weights.target("nano")
    assert good is not None
    number = store.weights.next_number("nano")
    bad = f"nano@{number}"
    damaged = product.home / "weights" / "nano" / str(number)
    shutil.copytree(good.path, damaged)
    replace(read_manifest(damaged), weights_version=bad).sealed().write(damaged)
    file = damaged / "serving" / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    store.weights.register(bad, "nano", str(damaged), parent=good.weights_version)
    store.weights.set_target("nano", Slot.STABLE, bad, reason="a test")
    try:
        refused = "SELECT count(*) FROM deployments WHERE wanted_version = ? AND NOT is_accepted"
        product.wait_until(lambda: product.one(refused, bad), 20, "refused")
        (deployment,) = store.weights.deployments("nano")
        assert deployment.weights_version == good.weights_version
        assert "model.safetensors is truncated" in deployment.reason
        assert ask(client) == good.weights_version

        # and so does a server that starts in this state
        server = product.role("server")
        os.kill(server.pid, signal.SIGKILL)
        product.wait_until(lambda: not server.is_alive and product.is_serving(), 60, "back")
        assert ask(client) == good.weights_version
    finally:
        store.weights.set_target("nano", Slot.STABLE, good.weights_version, reason="a test")
        store.weights.advance(bad, VersionState.CANDIDATE, VersionState.REJECTED, "a test")
    accepted = "SELECT count(*) FROM deployments WHERE is_accepted AND wanted_version = ?"
    product.wait_until(lambda: product.one(accepted, good.weights_version), 20, "accepted")


def test_a_disk_that_takes_no_weights_fails_the_run_and_nothing_else(
    product: Any, store: Store, client: openai.OpenAI
) -> None:
    for place in range(8):
        ask(client, f"disk-{place}", **{"X-M1-Group-Id": f"disk-{place // 2}"})
        reward = {"session_id": f"disk-{place}", "value": place % 2}
        client.post("/feedback", body=reward, cast_to=object)
    sql = "SELECT count(*) FROM trajectories WHERE state = 'eligible'"
    product.wait_until(lambda: product.one(sql) >= 8, 30, "rewarded")
    trainer = product.role("trainer")
    resource.prlimit(trainer.pid, resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))
    try:
        run = finished(product, store)
    finally:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(trainer.pid, resource.RLIMIT_FSIZE, unlimited)
    assert (run.state, run.phase) == ("failed", "write")
    assert "could not write" in run.reason
    assert "Free space or move the weights directory" in run.reason
    weights = product.home / "weights" / "nano"
    before = {path.name for path in weights.iterdir()}
    assert not any(name.startswith(".") for name in before)
    assert product.role("trainer") == trainer

    # the data was given back, and the same trainer makes it good
    run = finished(product, store)
    assert run.state == "promoted", run.reason
    assert {path.name for path in weights.iterdir()} - before == {run.weights_version[5:]}


def finished(product: Any, store: Store) -> Any:
    run_id = product.retrain()
    product.wait_until(lambda: store.runs.get(run_id).finished_at, 60, "run finished")  # type: ignore[union-attr]
    return store.runs.get(run_id)


@pytest.mark.parametrize(
    ("number", "attempts"), [(signal.SIGSTOP, 2), (signal.SIGKILL, 1)], ids=["hangs", "dies"]
)
def test_a_scorer_that_breaks_is_replaced_and_its_job_done(
    product: Any, client: openai.OpenAI, number: signal.Signals, attempts: int
) -> None:
    assert reward_of(product, client) == [(0.0, "ok", 1)]
    (scorer,) = scorers(product)
    os.kill(scorer.pid, number)
    assert reward_of(product, client) == [(0.0, "ok", attempts)]
    assert not scorer.is_alive


def reward_of(product: Any, client: openai.OpenAI) -> list[tuple[Any, ...]]:
    """Value, status and attempts of a new episode, which a random model cannot solve."""
    session_id = uuid.uuid4().hex
    ask(client, session_id, **{"X-M1-Task-Id": "sums/train/1"})
    sql = (
        "SELECT reward, reward_status, attempts FROM trajectories JOIN jobs "
        "ON key = 'score:' || trajectory_id WHERE session_id = ? AND jobs.state = 'done'"
    )
    product.wait_until(lambda: product.rows(sql, session_id), 60, "scored")
    return list(product.rows(sql, session_id))


def scorers(product: Any) -> list[Any]:
    """The worker's; the trainer's is its own."""
    worker = product.role("worker")
    found = []
    for process in product.descendants():
        stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        is_scorer = SCORER in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        if is_scorer and int(stat[1]) == worker.pid:
            found.append(process)
    return found
