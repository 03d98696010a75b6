"""Thousands of hostile requests against a real server: none may end in a 5xx, nothing may be left.

    python benchmarks/hostile.py [--requests 10000] [--seed 0] [--concurrency 16] [--ray]

The server runs the shipped nano. Prints JSON; exits with 1 when a 5xx came, an answer broke off
inside, an error was not in OpenAI's shape, the engine died or a slot was not given back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from mutations import Hostile, draw_request

from m1serve.clients.local_server import LocalServer, local_server

SETTINGS = ("model.max_tokens=16", "engine.num_slots=32", "engine.max_model_len=512")
"""A short context, for a body may ask for all of it."""
ANSWER_S = 60.0
UNREAD_S = 0.3
"""How long to wait for an answer to a request whose body may be incomplete."""
SETTLE_S = 30.0
MAX_SHOWN = 20


@dataclass
class Tally:
    by_status: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    """What must not happen, the first of them in full."""

    def blame(self, hostile: Hostile, what: str) -> None:
        start = hostile.body[:300] if len(hostile.body) > 300 else hostile.body
        self.bad.append(f"{hostile.name}: {what}; {hostile.head[:200]!r} {start!r}")


async def send(port: int, hostile: Hostile, tally: Tally) -> None:
    tally.by_kind[hostile.name] += 1
    try:
        answer = await asyncio.wait_for(exchange(port, hostile), ANSWER_S)
    except TimeoutError:
        tally.by_status["no answer"] += 1
        tally.blame(hostile, f"no answer within {ANSWER_S:.0f} s")
        return
    except OSError as error:
        tally.by_status["closed"] += 1
        if hostile.is_http:
            tally.blame(hostile, f"closed inside the request: {error}")
        return
    judge(hostile, answer, tally)


async def exchange(port: int, hostile: Hostile) -> bytes | None:
    """The whole answer; None when we hung up, b"" when the server did."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(hostile.head)
        place = hostile.pause_at or 0
        writer.write(hostile.body[:place])
        await writer.drain()
        if hostile.pause_at is not None:
            await asyncio.sleep(0.05)
            if hostile.hangs_up:
                return None
        writer.write(hostile.body[place:])
        await writer.drain()
        if hostile.is_http:
            return await reader.read(-1)
        try:
            return await asyncio.wait_for(reader.read(-1), UNREAD_S)
        except TimeoutError:
            return None
    finally:
        writer.close()


def judge(hostile: Hostile, answer: bytes | None, tally: Tally) -> None:
    if answer is None:
        tally.by_status["we hung up"] += 1
        return
    if not answer:
        tally.by_status["closed"] += 1
        if hostile.is_http:
            tally.blame(hostile, "closed without an answer")
        return
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        head, _, body = body.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1].decode()
    tally.by_status[status] += 1
    if status.startswith("5"):
        tally.blame(hostile, f"status {status}: {body[:300]!r}")
    elif b'"type":"server_error"' in body or b'"type": "server_error"' in body:
        tally.blame(hostile, f"an error inside the answer: {body[-300:]!r}")
    elif status.startswith("4") and hostile.is_http and not is_openai_error(body):
        tally.blame(hostile, f"no error of OpenAI's shape: {body[:300]!r}")


def is_openai_error(body: bytes) -> bool:
    try:
        error: dict[str, Any] = json.loads(body)["error"]
    except (ValueError, LookupError, TypeError):
        return False
    return bool(error["message"]) and {"message", "type", "param", "code"} == error.keys()


async def torment(port: int, options: argparse.Namespace) -> Tally:
    draw, tally = random.Random(options.seed), Tally()
    left = iter(range(options.requests))

    async def one_after_the_other() -> None:
        for num in left:
            await send(port, draw_request(draw), tally)
            if (num + 1) % 1000 == 0:
                print(f"{num + 1}: {dict(tally.by_status)}", file=sys.stderr, flush=True)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(options.concurrency):
            tasks.create_task(one_after_the_other())
    return tally


def report(server: LocalServer, tally: Tally, options: argparse.Namespace) -> dict[str, Any]:
    load = server.load_when_settled(SETTLE_S)
    called = ["python", "benchmarks/hostile.py", *sys.argv[1:]]
    return {
        "command": shlex.join(called),
        "server": "Ray Serve" if options.ray else "uvicorn",
        "requests": sum(tally.by_kind.values()),
        "status_5xx": sum(n for s, n in tally.by_status.items() if s.startswith("5")),
        "engine_alive": server.is_alive,
        "leaked_slots": load.slots_in_use,
        "stuck_requests": load.waiting + load.open_responses,
        "by_status": dict(sorted(tally.by_status.items())),
        "by_kind": dict(sorted(tally.by_kind.items())),
        "wrong": len(tally.bad),
        "first_wrong": tally.bad[:MAX_SHOWN],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--ray", action="store_true", help="through Ray Serve")
    options = parser.parse_args()
    with local_server(*SETTINGS, with_ray=options.ray) as server:
        tally = asyncio.run(torment(server.port, options))
        found = report(server, tally, options)
        if tally.bad:
            print(server.log_file.read_text()[-6000:], file=sys.stderr)
    print(json.dumps(found, indent=1))
    is_clean = found["engine_alive"] and not (
        found["wrong"] or found["leaked_slots"] or found["stuck_requests"]
    )
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
