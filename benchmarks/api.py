"""What the HTTP layer costs: requests a second and server CPU a request over a scripted engine.

    python benchmarks/api.py [--requests 400] [--concurrency 8]

Prints one JSON object. The server runs in a process of its own behind uvicorn; the client is a bare
socket, so that it does not become the limit. The engine's share is in the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

REPLY = "<think>\nAn easy one.\n</think>\nHello there."
SYSTEM = "You answer questions about orders. " * 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    name: str
    num_requests: int
    requests_per_s: float
    server_cpu_ms: float
    """Of one request: user and system time of the server process."""
    p50_ms: float
    p99_ms: float


class Forgetful:
    """A journal that keeps nothing."""

    dropped = 0
    num_queued = 0
    is_alive = True

    def append(self, record: object, /) -> None:
        del record

    def when_written(self, callback: Callable[[], None], /) -> None:
        callback()


def serve(port: int, ready: Connection) -> None:
    """The server process."""
    import uvicorn

    from m1serve.api import create_app
    from m1serve.chat.byte_tokenizer import byte_tokenizer
    from m1serve.config import EngineSettings, ModelSettings, Settings
    from m1serve.engine.scripted import ScriptedEngine, ScriptedReply

    engine_settings = EngineSettings(kind="scripted", max_model_len=65536)
    settings = Settings(engine=engine_settings, model=ModelSettings(model_id="bench"))
    tokenizer = byte_tokenizer()
    engine = ScriptedEngine(
        lambda _: ScriptedReply(text=REPLY), tokenizer=tokenizer, settings=engine_settings
    )
    app = create_app(engine, Forgetful(), settings, tokenizer)
    config = uvicorn.Config(app, port=port, log_level="error", access_log=False)
    server = uvicorn.Server(config)

    async def run() -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        ready.send(True)
        await serving

    asyncio.run(run())


def request_bytes(body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> bytes:
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not head.startswith(b"http/1.1 200"):
        raise RuntimeError(head.decode())
    if b"transfer-encoding: chunked" in head:
        return await reader.readuntil(b"\r\n0\r\n\r\n")
    size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    return await reader.readexactly(size)


async def load(port: int, request: bytes, *, count: int, concurrency: int) -> list[float]:
    """Seconds of each request; `concurrency` connections share the count."""
    latencies: list[float] = []

    async def worker(num: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
        for _ in range(num):
            begin = time.perf_counter()
            await exchange(reader, writer, request)
            latencies.append(time.perf_counter() - begin)
        writer.close()
        await writer.wait_closed()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(worker(count // concurrency))
    return latencies


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    name: str, port: int, pid: int, body: dict[str, object], *, count: int, concurrency: int
) -> Result:
    request = request_bytes(body)
    asyncio.run(load(port, request, count=concurrency * 4, concurrency=concurrency))
    cpu, begin = cpu_s(pid), time.perf_counter()
    latencies = sorted(asyncio.run(load(port, request, count=count, concurrency=concurrency)))
    seconds, num = time.perf_counter() - begin, len(latencies)
    return Result(
        name=name,
        num_requests=num,
        requests_per_s=round(num / seconds, 1),
        server_cpu_ms=round((cpu_s(pid) - cpu) / num * 1000, 2),
        p50_ms=round(latencies[num // 2] * 1000, 2),
        p99_ms=round(latencies[int(num * 0.99)] * 1000, 2),
    )


def bodies() -> dict[str, dict[str, object]]:
    user: dict[str, object] = {"role": "user", "content": "Where is order 4217?"}
    small: dict[str, object] = {"model": "bench", "messages": [user], "max_tokens": 100}
    tools = [
        {"type": "function", "function": {"name": f"tool_{n}", "parameters": {"type": "object"}}}
        for n in range(16)
    ]
    turns = [user, {"role": "assistant", "content": "It is here."}] * 10
    history = [{"role": "system", "content": SYSTEM}, *turns, user]
    return {
        "small": small,
        "small stream": {**small, "stream": True},
        "21 messages, 16 tools": {**small, "messages": history, "tools": tools},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--concurrency", type=int, default=8)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    server = context.Process(target=serve, args=(port, child), daemon=True)
    server.start()
    parent.recv()
    assert server.pid is not None
    results = [
        measure(
            name,
            port,
            server.pid,
            body,
            count=options.requests,
            concurrency=options.concurrency,
        )
        for name, body in bodies().items()
    ]
    server.terminate()
    server.join()
    print(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
