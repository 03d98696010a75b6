"""Thousands of clients that hang up at random moments: every slot must come back, nothing hang.

    python benchmarks/aborts.py [--aborts 10000] [--seed 0] [--concurrency 32] [--ray]

The server runs the shipped nano. Half of the requests stream, a third have long prompts; hang-ups
come inside the body, at once, while the prompt is read, before and after the first bytes; half of
them reset the connection. After every slice of 1,000 the server has 10 s to be idle again, and
still answers. Prints JSON; exits with 1 when anything was left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx

from m1serve.clients.local_server import LocalServer, local_server

SETTINGS = ("engine.num_slots=16", "engine.max_model_len=4096")
SLICE = 1000
SETTLE_S = 10.0
NEVER_S = 60.0
"""A client that waits this long for the bytes it wanted to see first is a stuck request."""
MOMENTS = ("inside the body", "at once", "after a while", "at the first bytes", "mid-stream")


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    moment: str
    request: bytes
    wait_s: float
    """After the request, or after the first bytes."""
    is_reset: bool
    is_stream: bool


def draw_abort(draw: random.Random) -> Abort:
    is_stream = draw.random() < 0.5
    # without a stream there are no first bytes before the end
    moment = draw.choice(MOMENTS if is_stream else MOMENTS[:3])
    words = draw.choice((2, 2, 700)) + draw.randrange(20)
    # fresh words: a prompt that was read before costs nothing to read
    text = " ".join(f"w{draw.randrange(10**4)}" for _ in range(words))[:3000]
    body: dict[str, Any] = {
        "model": "nano",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 400,
        "n": draw.choice((1, 1, 1, 3)),
        # or nano ends its answer within a few tokens
        "logit_bias": {"2": -100},
    }
    if is_stream:
        body["stream"] = True
    content = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(content) + content
    if moment == "inside the body":
        request = request[: -draw.randrange(1, len(content))]
    return Abort(
        moment=moment,
        request=request,
        wait_s=0.0 if moment in ("at once", "at the first bytes") else draw.uniform(0, 0.4),
        is_reset=draw.random() < 0.5,
        is_stream=is_stream,
    )


async def commit(port: int, abort: Abort, tally: Counter[str]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(abort.request)
        await writer.drain()
        if abort.moment in ("at the first bytes", "mid-stream"):
            await asyncio.wait_for(reader.read(1), NEVER_S)
        await asyncio.sleep(abort.wait_s)
        # what has come without being read is in the reader's buffer
        tally["finished before" if has_ended(reader) else abort.moment] += 1
    except TimeoutError:
        tally["stuck"] += 1
    except OSError:
        tally["connection lost"] += 1
    finally:
        if abort.is_reset:
            writer.transport.abort()
        writer.close()


def has_ended(reader: asyncio.StreamReader) -> bool:
    came = bytes(reader._buffer)  # type: ignore[attr-defined]
    return came.endswith(b"0\r\n\r\n") or (b"content-length: " in came and came.endswith(b"}"))


async def hang_up(port: int, draw: random.Random, num: int, concurrency: int) -> Counter[str]:
    """Until `num` requests were aborted before their end."""
    tally: Counter[str] = Counter()

    async def one_after_the_other() -> None:
        while sum(tally[moment] for moment in MOMENTS) + len(running) <= num:
            await commit(port, draw_abort(draw), tally)
        running.pop()

    running = [True] * concurrency
    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(one_after_the_other())
    while (missing := num - sum(tally[moment] for moment in MOMENTS)) > 0:
        for _ in range(missing):
            await commit(port, draw_abort(draw), tally)
    return tally


def still_answers(server: LocalServer) -> bool:
    body = {"model": "nano", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30, verify=False)
    return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0


def measure(server: LocalServer, options: argparse.Namespace) -> dict[str, Any]:
    draw, tally = random.Random(options.seed), Counter[str]()
    leaked = stuck = 0
    slowest_s = 0.0
    answers = True
    for start in range(0, options.aborts, SLICE):
        num = min(SLICE, options.aborts - start)
        tally += asyncio.run(hang_up(server.port, draw, num, options.concurrency))
        begin = time.monotonic()
        load = server.load_when_settled(SETTLE_S)
        slowest_s = max(slowest_s, time.monotonic() - begin)
        leaked, stuck = load.slots_in_use, load.waiting + load.open_responses
        answers = answers and still_answers(server)
        print(f"{start + num}: {dict(tally)} {load}", file=sys.stderr, flush=True)
    return {
        "command": shlex.join(["python", "benchmarks/aborts.py", *sys.argv[1:]]),
        "server": "Ray Serve" if options.ray else "uvicorn",
        "aborts": sum(tally[moment] for moment in MOMENTS),
        "leaked_slots": leaked,
        "stuck_requests": stuck + tally["stuck"],
        "connections_lost": tally["connection lost"],
        "finished_before_the_abort": tally["finished before"],
        "by_moment": {moment: tally[moment] for moment in MOMENTS},
        "idle_again_after_s_at_most": round(slowest_s, 2),
        "still_answers": answers,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--aborts", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--ray", action="store_true", help="through Ray Serve")
    options = parser.parse_args()
    with local_server(*SETTINGS, with_ray=options.ray) as server:
        found = measure(server, options)
        log = server.log_file.read_text()
    print(json.dumps(found, indent=1))
    is_clean = found["still_answers"] and not (
        found["leaked_slots"] or found["stuck_requests"] or found["connections_lost"]
    )
    if not is_clean:
        print(log[-6000:], file=sys.stderr)
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
