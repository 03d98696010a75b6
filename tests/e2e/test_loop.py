"""The whole loop in one process, on a tiny random model: serve, keep, score, train, prove, swap."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest
import uvicorn

from m1serve.api.app import create_app
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.cli.options import settings_tree
from m1serve.cli.weights import register_first
from m1serve.clients.agent import Agent, EpisodePlan
from m1serve.config import Settings, load_settings
from m1serve.engine.launch import first_version, start_engine
from m1serve.engine.watcher import VersionWatcher
from m1serve.model.tiny import tiny_model_dir
from m1serve.online_rl.scorers.sandbox import Sandbox
from m1serve.online_rl.scoring import score_job
from m1serve.online_rl.trainer import Trainer
from m1serve.store import Store
from m1serve.store.journal import JournalWriter
from m1serve.store.sidecar import Sidecar
from m1serve.types import Mode


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    model = tiny_model_dir(tmp_path / "model")
    tree = settings_tree(
        [
            (["home"], tmp_path / "home"),
            (["model", "path"], model),
            (["model", "max_tokens"], 12),
            (["train", "minibatches"], 2),
            (["train", "num_threads"], 1),
            (["gate", "tasks_per_family"], 2),
            (["gate", "families"], ["sums", "gcd"]),
            # two random texts of four are not a rate
            (["gate", "min_format_rate"], 0.0),
        ]
    )
    return load_settings(**tree)


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    opened = Store.open(settings.database)
    register_first(settings, opened)
    yield opened
    opened.close()


class Product:
    """The three roles, each doing one step when told to."""

    def __init__(self, settings: Settings, store: Store, sandbox: Sandbox) -> None:
        self.settings, self.store, self.sandbox = settings, store, sandbox
        self.version = first_version(store, settings)
        self.tokenizer = ChatTokenizer.load(Path(self.version.path) / "serving")
        self.journal = JournalWriter(settings.journal_dir)
        self.engine = start_engine(settings, self.version)
        self.watcher = VersionWatcher(self.engine, store, model_id="nano", replica="test")
        self.sidecar = Sidecar(store, settings.journal_dir)

    def ingest(self) -> None:
        self.journal.flush()
        self.sidecar.run_once()

    def score(self) -> int:
        jobs = [job.job_id for job in self.store.jobs.due(time.time()) if job.kind == "score"]
        arguments = (self.store, self.tokenizer, self.sandbox)
        return sum(score_job(*arguments, job_id, self.settings.score) for job_id in jobs)

    def train(self) -> str:
        run_id = self.store.runs.request("nano", "test", {})
        trainer = Trainer(
            store=self.store,
            settings=self.settings,
            tok=self.tokenizer,
            sandbox=self.sandbox,
            owner="test",
        )
        assert trainer.work_once(threading.Event())
        run = self.store.runs.get(run_id)
        assert run is not None
        assert run.state == "promoted", run.reason
        return str(run.weights_version)


@asynccontextmanager
async def serving(product: Product) -> AsyncIterator[str]:
    """The API on a loopback port; yields its base URL."""
    app = create_app(product.engine, product.journal, product.settings, product.tokenizer)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        await task
        await product.engine.close()
        product.journal.close()


async def chat(client: openai.AsyncOpenAI, group: int, place: int) -> str:
    """One session of one turn, rewarded by its client; returns the version that answered."""
    session_id = f"chat-{group}-{place}"
    completion = await client.chat.completions.create(
        model="nano",
        messages=[{"role": "user", "content": f"question {group}"}],
        extra_headers={
            "X-M1-Session-Id": session_id,
            "X-M1-Group-Id": f"chat-{group}",
            "X-M1-Mode": "train",
        },
    )
    reward = {"session_id": session_id, "value": float(place % 2)}
    await client.post("/feedback", body=reward, cast_to=object)
    await client.post(f"/sessions/{session_id}/end", cast_to=object)
    return str(completion.system_fingerprint)


async def play_episodes(url: str) -> None:
    agent = Agent(url, model="nano", concurrency=8)
    plans = [
        EpisodePlan(task_id=t, session_id=f"{mode}-{t[-1]}", group_key=f"{mode}-{t}", mode=mode)
        for mode in (Mode.TRAIN, Mode.EVAL)
        for t in ("lookup/train/0", "sums/train/1")
    ]
    played = await agent.play_all(plans)
    await agent.close()
    assert [p.failures for p in played] == [()] * len(plans)


async def test_the_loop_turns_feedback_into_weights_that_serve(
    settings: Settings, store: Store
) -> None:
    with Sandbox(timeout_s=20.0, memory_bytes=settings.score.memory_bytes) as sandbox:
        product = Product(settings, store, sandbox)
        async with (
            serving(product) as url,
            openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
        ):
            await play_episodes(url)
            chats = [chat(client, group, place) for group in range(3) for place in range(4)]
            assert set(await asyncio.gather(*chats)) == {"nano@0"}

            await asyncio.to_thread(product.ingest)
            assert await asyncio.to_thread(product.score) == 4
            rows = store.ledger.list_trajectories(limit=100)
            assert len(rows) == 16
            judged = {row.session_id: row.reward for row in rows}
            assert judged["chat-0-1"] == 1.0
            assert judged["train-0"] == judged["eval-1"] == 0.0
            assert {r.state for r in rows if r.mode is Mode.EVAL} == {"ineligible"}

            assert await asyncio.to_thread(product.train) == "nano@1"
            trained = store.ledger.list_trajectories(state="consumed", limit=100)
            assert {row.session_id.rpartition("-")[0] for row in trained} >= {"chat-0", "chat-2"}
            assert Mode.EVAL not in {row.mode for row in trained}

            await product.watcher.look()
            (deployment,) = store.weights.deployments("nano")
            assert (deployment.weights_version, deployment.is_accepted) == ("nano@1", True)
            assert await chat(client, 9, 0) == "nano@1"
