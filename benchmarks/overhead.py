"""What the API adds: to a token, to the first token, to a million-token prompt, to an 80K answer.

    python benchmarks/overhead.py --merges merges.txt [--repeat 5] [--with-ray]

Writes benchmarks/results/overhead.json: each bar with the value measured, best of `repeat`, and
whether it is met. The engine behind the server costs nothing; merges.txt is the tokenizer's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import socket
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import overhead_ray
from overhead_server import MODEL, serve, texts

RESULT = Path(__file__).parent / "results" / "overhead.json"
EVENT = re.compile(rb"data: (\{.*\})\n")
CHARS_A_TOKEN = 3.65
STREAM_TOKENS, ANSWER_TOKENS, PROMPT_TOKENS = 20_000, 80_000, 1_000_000
BARS = {
    "uvicorn_us_per_token": 20.0,
    "ray_serve_us_per_token": 40.0,
    "first_token_ms_at_2k": 5.0,
    "million_to_engine_s": 1.0,
    "million_tokenise_cold_s": 1.5,
    "million_reused_s": 0.1,
    "recording_80k_us_per_token": 1.0,
}


@dataclass(frozen=True, slots=True)
class Answer:
    sent_at: float
    first_at: float
    last_at: float
    chunks: list[bytes]


class Client:
    """One bare socket, so that the client is not what is measured."""

    def __init__(self, port: int, pipe: Connection) -> None:
        self._port, self._pipe = port, pipe

    def ask_server(self, word: str) -> dict[str, float]:
        self._pipe.send(word)
        answer: dict[str, float] = json.loads(self._pipe.recv())
        return answer

    def post(self, body: bytes, *, mode: str = "off") -> Answer:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: b\r\nx-m1-mode: {mode}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        pieces, first_at = [], 0.0
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sent_at = time.perf_counter()
            connection.sendall(head.encode() + body)
            while piece := connection.recv(2**20):
                if not first_at and b"chat.completion.chunk" in piece:
                    first_at = time.perf_counter()
                pieces.append(piece)
                if piece.endswith(b"0\r\n\r\n"):
                    break
            last_at = time.perf_counter()
        whole = b"".join(pieces)
        if not whole.startswith(b"HTTP/1.1 200") or b"[DONE]" not in whole:
            raise RuntimeError(whole[-500:].decode(errors="replace"))
        return Answer(sent_at, first_at, last_at, EVENT.findall(whole))


def body_of(messages: list[dict[str, str]], max_tokens: int) -> bytes:
    value = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": max_tokens}
    return json.dumps(value).encode()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def per_token(client: Client) -> dict[str, float]:
    """One delta a token and one event a delta: nothing is merged. The server's CPU time decides: it
    is one thread's, so it is the time it takes on a core of its own.
    """
    bare = client.ask_server(str(STREAM_TOKENS))["bare_cpu_s"]
    before = client.ask_server("note")["cpu_s"]
    answer = client.post(body_of([user("Hi")], STREAM_TOKENS))
    cpu_s = client.ask_server("note")["cpu_s"] - before
    took_s = answer.last_at - answer.sent_at
    return {
        "uvicorn_us_per_token": (cpu_s - bare) / STREAM_TOKENS * 1e6,
        "uvicorn_wall_us_per_token_with_engine": took_s / STREAM_TOKENS * 1e6,
    }


def first_token(client: Client, text: str, place: int) -> dict[str, float]:
    """Every prompt is another, so that no part of it is remembered."""
    size = int(2000 * CHARS_A_TOKEN)
    begin = 977 * (place + 1)
    answer = client.post(body_of([user(f"{place} {text[begin : begin + size]}")], 4))
    return {"first_token_ms_at_2k": (answer.first_at - answer.sent_at) * 1e3}


def million(client: Client, text: str, place: int) -> dict[str, float]:
    """A conversation of 21 messages and a million tokens, then the same with one more question."""
    size = int(PROMPT_TOKENS * CHARS_A_TOKEN) // 20
    turns = [user(f"{place}.{n} {text[n * size : (n + 1) * size]}") for n in range(20)]
    messages = [turns[0]]
    for turn in turns[1:]:
        messages += [{"role": "assistant", "content": "Go on."}, turn]
    client.ask_server("note")
    answer = client.post(body_of(messages, 8))
    cold = client.ask_server("note")
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in answer.chunks]
    content = "".join(delta.get("content", "") for delta in deltas)
    messages += [{"role": "assistant", "content": content}, user("And then?")]
    client.ask_server("note")
    again = client.post(body_of(messages, 8))
    reused = client.ask_server("note")
    to_engine_s = cold["reached_at"] - answer.sent_at
    return {
        "million_prompt_tokens": cold["num_prompt_tokens"],
        "million_tokenise_cold_s": cold["encode_s"],
        "million_to_engine_s": to_engine_s - cold["encode_s"],
        "million_loop_stall_ms": cold["stall_s"] * 1e3,
        "million_reused_encode_s": reused["encode_s"],
        "million_reused_s": reused["reached_at"] - again.sent_at,
    }


def recording(client: Client) -> dict[str, float]:
    """CPU of the whole server, journal threads included; and from the engine's last token to the
    end of the stream, which waits until the turn is written.
    """
    found = {}
    for mode in ("off", "train"):
        before = client.ask_server("note")["cpu_s"]
        answer = client.post(body_of([user("Hi")], ANSWER_TOKENS), mode=mode)
        after = client.ask_server("note")
        found[f"answer_80k_end_ms_{mode}"] = (answer.last_at - after["ended_at"]) * 1e3
        found[f"answer_80k_cpu_us_per_token_{mode}"] = (
            (after["cpu_s"] - before) / ANSWER_TOKENS * 1e6
        )
    return found


@contextmanager
def server(merges: Path) -> Iterator[Client]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as home:
        process = context.Process(target=serve, args=(port, merges, Path(home), theirs))
        process.start()
        ours.recv()
        try:
            yield Client(port, ours)
        finally:
            ours.send("end")
            process.join(20)
            process.kill()


def measure(merges: Path, repeat: int) -> dict[str, float]:
    """The lowest of each: what others do on the machine only adds."""
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = texts(library, int(PROMPT_TOKENS * CHARS_A_TOKEN) + 10_000)
    best: dict[str, float] = {}
    with server(merges) as client:
        for place in range(repeat):
            firsts = [first_token(client, text, 20 * place + n) for n in range(20)]
            for found in (
                *firsts,
                per_token(client),
                million(client, text, place),
                recording(client),
            ):
                for name, value in found.items():
                    best[name] = min(value, best.get(name, value))
    recorded, plain = (best[f"answer_80k_cpu_us_per_token_{mode}"] for mode in ("train", "off"))
    best["recording_80k_us_per_token"] = recorded - plain
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--merges", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--with-ray", action="store_true")
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    found = measure(args.merges, args.repeat)
    if args.with_ray:
        found |= overhead_ray.measure(args.repeat)
    bars = {
        name: {"bar": bar, "measured": round(found[name], 4), "is_met": found[name] <= bar}
        for name, bar in BARS.items()
        if name in found
    }
    words = [args.merges.name if word == str(args.merges) else word for word in sys.argv[1:]]
    report = {
        "command": " ".join(["python", "benchmarks/overhead.py", *words]),
        "best_of": args.repeat,
        "load_1min": [load_before, os.getloadavg()[0]],
        "cores": os.cpu_count(),
        "bars": bars,
        "beside": {k: round(v, 4) for k, v in found.items() if k not in BARS},
    }
    RESULT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
