"""The part of overhead.py that needs Ray: a scripted engine behind `m1serve serve`, token by token.

The engine plays at full speed and merges deltas for 20 ms, as the API asks every engine to. What is
reported is wall time with the engine's own: it works in a process beside, so nothing is subtracted.
A slow engine's deltas hold few tokens each: what one of those costs in CPU is not measured here.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

NUM_TOKENS = 20_000
READY_S = 120.0
RUN = "from m1serve.config import load_settings; from m1serve.ray_app import serve_with_ray; "
RUN += "serve_with_ray(load_settings(None))"


def measure(repeat: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as root:
        environment = prepare_home(Path(root))
        with (Path(root) / "log").open("wb") as log:
            command = [sys.executable, "-c", RUN]
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            base = f"http://127.0.0.1:{environment['M1SERVE_SERVE__PORT']}"
            with httpx.Client(base_url=base, timeout=120) as client:
                wait_until_healthy(client, process)
                stream_s(client)
                over_ray = min(stream_s(client) for _ in range(repeat))
                first_s = min(million_first_s(client, place) for place in range(repeat))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        bare = min(asyncio.run(bare_s(Path(root) / "script.jsonl")) for _ in range(repeat))
    return {
        "ray_serve_us_per_token": over_ray / NUM_TOKENS * 1e6,
        "ray_serve_million_first_chunk_s": first_s,
        "scripted_engine_alone_us_per_token": bare / NUM_TOKENS * 1e6,
    }


def prepare_home(root: Path) -> dict[str, str]:
    """A store with one version of the scripted engine; returns the environment to serve it."""
    from m1serve.chat.byte_tokenizer import byte_tokenizer
    from m1serve.store import Store
    from m1serve.types import Slot, VersionState

    serving = root / "home" / "weights" / "nano" / "0" / "serving"
    serving.mkdir(parents=True)
    (serving / "tokenizer.json").write_text(byte_tokenizer().to_json())
    script = root / "script.jsonl"
    script.write_text(json.dumps({"text": "word " * (NUM_TOKENS // 5)}))
    store = Store.open(f"sqlite:///{root / 'home' / 'm1serve.db'}")
    store.weights.register("nano@0", "nano", str(serving.parent), state=VersionState.ACTIVE)
    store.weights.set_target("nano", Slot.STABLE, "nano@0")
    store.close()
    return {
        **os.environ,
        "M1SERVE_HOME": str(root / "home"),
        "M1SERVE_ENGINE__KIND": "scripted",
        "M1SERVE_ENGINE__SCRIPT": str(script),
        "M1SERVE_ENGINE__MAX_MODEL_LEN": "1200000",
        "M1SERVE_SERVE__PORT": str(free_port()),
        "M1SERVE_SERVE__ADMIN_PORT": str(free_port()),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise RuntimeError("the server ended, or was not ready in time")


def stream_s(client: httpx.Client) -> float:
    body = {
        "model": "nano",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "max_tokens": NUM_TOKENS,
    }
    begin = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        last = b"".join(answer.iter_raw())
    if b"[DONE]" not in last:
        raise RuntimeError(last[-500:].decode())
    return time.perf_counter() - begin


def million_first_s(client: httpx.Client, place: int) -> float:
    """A million bytes, each a token of its own: tokenising, the way to the replica, and back."""
    text = f"{place}" + "Some words, and more. " * 45_500
    body = {
        "model": "nano",
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "max_tokens": 8,
    }
    begin = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        pieces = answer.iter_raw()
        next(pieces)
        took_s = time.perf_counter() - begin
        for _ in pieces:
            pass
    return took_s


async def bare_s(script: Path) -> float:
    from m1serve.chat.byte_tokenizer import byte_tokenizer
    from m1serve.config import EngineSettings
    from m1serve.engine.scripted import ScriptedEngine
    from m1serve.types import GenerateRequest, Limits

    settings = EngineSettings(kind="scripted", max_model_len=2 * NUM_TOKENS)
    engine = ScriptedEngine(script, tokenizer=byte_tokenizer(), settings=settings)
    request = GenerateRequest(
        id="bare",
        prompt_ids=(1,),
        limits=Limits(max_tokens=NUM_TOKENS),
        min_delta_interval_s=0.02,
    )
    begin = time.perf_counter()
    async for _ in engine.generate(request):
        pass
    took_s = time.perf_counter() - begin
    await engine.close()
    return took_s
