"""The app behind Ray Serve: refused ports, and one whole run from start to SIGTERM."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import httpx
import pytest

from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.config import Settings
from m1serve.errors import ConfigError
from m1serve.store import Store
from m1serve.store.journal import JournalReader
from m1serve.store.records import TurnRecord, TurnsDelivered
from m1serve.types import Slot, VersionState

pytestmark = pytest.mark.filterwarnings("ignore")
"""Ray warns about itself when it is imported."""

HI: Any = [{"role": "user", "content": "Hi"}]
RUN = "from m1serve.config import load_settings; from m1serve.ray_app import serve_with_ray; "
RUN += "serve_with_ray(load_settings(None))"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.mark.parametrize("name", ["port", "admin_port"])
def test_a_taken_port_is_refused_by_name(
    name: str, listener: socket.socket, tmp_path: Path
) -> None:
    from m1serve.ray_app import serve_with_ray

    ports = {"port": free_port(), "admin_port": free_port()}
    ports[name] = listener.getsockname()[1]
    settings = Settings(home=tmp_path, serve=ports)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"serve\.{name}: cannot listen on .*{ports[name]}"):
        serve_with_ray(settings)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_requests_pass_through_ray_and_sigterm_ends_it(tmp_path: Path) -> None:
    environment = prepare_home(tmp_path)
    base = f"http://127.0.0.1:{environment['M1SERVE_SERVE__PORT']}"
    with (tmp_path / "log").open("w") as log:
        process = start_server(environment, log)
    try:
        async with httpx.AsyncClient(verify=False, base_url=base) as http:
            await until_healthy(http, process)
            body: dict[str, Any] = {"model": "nano", "messages": HI, "max_tokens": 60}
            whole = await http.post("/v1/chat/completions", json=body)
            streamed = await http.post("/v1/chat/completions", json={**body, "stream": True})
            second = await http.post("/v1/chat/completions", json=second_turn(body))
            gone = {**body, "stream": True, "max_tokens": 1000}
            async with http.stream("POST", "/v1/chat/completions", json=gone) as answer:
                await answer.aiter_bytes().__anext__()
            waiting = asyncio.create_task(
                http.post("/v1/chat/completions", json={**gone, "stream": False})
            )
            await asyncio.sleep(1.0)
            running = (await http.get("/health")).json()["running"]
            waiting.cancel()
            await asyncio.sleep(1.5)
            health = (await http.get("/health")).json()
    finally:
        process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(process.wait, 60)
    content = whole.json()["choices"][0]["message"]["content"]
    events = [line for line in streamed.text.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in events]
    assert "".join(delta.get("content", "") for delta in deltas) == content
    assert second.json()["choices"][0]["message"]["content"] == content
    assert len(whole.headers["x-request-id"].split(",")) == 1
    assert (running, health["running"]) == (1, 0)
    assert code == 0
    entries = list(JournalReader(tmp_path / "home" / "journal").read_new({}))
    turns = [entry.record for entry in entries if isinstance(entry.record, TurnRecord)]
    sent = [entry.record.turn_ids for entry in entries if isinstance(entry.record, TurnsDelivered)]
    assert [turn.stop for turn in turns] == ["length", "length", "length", "abort", "abort"]
    assert sent == [(turn.turn_id,) for turn in turns[:3]]


def second_turn(body: dict[str, Any]) -> dict[str, Any]:
    """Calls in the history: ray-project/ray#60291, lists that could be read only once."""
    function = {"name": "look", "arguments": '{"x": 1}'}
    calls = [{"id": "c1", "type": "function", "function": function}]
    history = [
        *body["messages"],
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "found"}]},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    return {**body, "messages": history, "tools": tools}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(environment: dict[str, str], log: TextIO) -> subprocess.Popen[bytes]:
    """No asyncio subprocess: its transport may outlive the loop, and warns in other tests then."""
    return subprocess.Popen([sys.executable, "-c", RUN], env=environment, stdout=log, stderr=log)


def prepare_home(root: Path) -> dict[str, str]:
    """A store with one version of the scripted engine; returns the environment to serve it."""
    serving = root / "home" / "weights" / "nano" / "0" / "serving"
    serving.mkdir(parents=True)
    tokenizer = byte_tokenizer()
    (serving / "tokenizer.json").write_text(tokenizer.to_json())
    script = root / "script.jsonl"
    script.write_text(json.dumps({"text": "word " * 400, "step_s": 0.01}))
    store = Store.open(f"sqlite:///{root / 'home' / 'm1serve.db'}")
    store.weights.register("nano@0", "nano", str(serving.parent), state=VersionState.ACTIVE)
    store.weights.set_target("nano", Slot.STABLE, "nano@0")
    store.close()
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "M1SERVE_HOME": str(root / "home"),
        "M1SERVE_ENGINE__KIND": "scripted",
        "M1SERVE_ENGINE__SCRIPT": str(script),
        "M1SERVE_SERVE__PORT": str(free_port()),
        "M1SERVE_SERVE__ADMIN_PORT": str(free_port()),
    }


async def until_healthy(http: httpx.AsyncClient, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(120):
        while process.poll() is None:
            try:
                if (await http.get("/health")).status_code == 200:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.2)
    pytest.fail("the server ended before it was ready")
