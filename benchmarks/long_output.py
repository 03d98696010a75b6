"""One answer of 81,920 sampled tokens over `m1serve up`, streamed and whole: does all of it arrive?

    python benchmarks/long_output.py [--tokens 81920] [--out long-output.json]

nano really samples them, about ten minutes each on two cores. Watched: the tokens that arrive and
those in the ledger, the longest silence on the wire, and the memory of the server's processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from m1serve.config import Settings
from m1serve.model.checkpoint import read_config

READY_S, LEDGER_S = 180.0, 120.0
ROOM_TOKENS = 4096


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(root: Path, num_tokens: int) -> tuple[subprocess.Popen[bytes], str]:
    ready = root / "ready.json"
    settings = [
        f"engine.max_model_len={num_tokens + ROOM_TOKENS}",
        "engine.num_slots=4",
        "engine.snapshot_bytes=0",
    ]
    command = [sys.executable, "-P", "-m", "m1serve.cli", "up", "--home", str(root / "home")]
    command += ["--port", str(free_port()), "--admin-port", str(free_port())]
    command += ["--ready-file", str(ready), *(p for s in settings for p in ("--set", s))]
    with (root / "up.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    deadline = time.monotonic() + READY_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"m1serve up is not ready: {(root / 'up.log').read_text()}")
        time.sleep(0.1)
    return process, str(json.loads(ready.read_text())["url"]).removesuffix("/v1")


@dataclass
class Memory:
    """Resident MiB of the processes that serve from one home, every few seconds."""

    home: Path
    samples: list[tuple[float, float]] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Memory:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        begin = time.monotonic()
        while not self._is_over.wait(2.0):
            self.samples.append((time.monotonic() - begin, serving_mib(self.home)))

    def summary(self) -> dict[str, float]:
        """Of the first tenth, when it is warm, and of the last."""
        values = [mib for _, mib in self.samples] or [serving_mib(self.home)]
        tenth = max(len(values) // 10, 1)
        return {
            "first_mib": max(values[:tenth]),
            "last_mib": max(values[-tenth:]),
            "max_mib": max(values),
        }


def serving_mib(home: Path) -> float:
    """Of Ray Serve's replicas of this home: the ingress and the engine."""
    total = 0.0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if b"ServeReplica" not in (entry / "cmdline").read_bytes():
                continue
            if f"M1SERVE_HOME={home}".encode() not in (entry / "environ").read_bytes():
                continue
            status = (entry / "status").read_text()
        except OSError:
            continue
        resident = next((x for x in status.splitlines() if x.startswith("VmRSS")), "VmRSS: 0 kB")
        total += int(resident.split()[1]) / 1024
    return total


def body_of(num_tokens: int, eos_id: int, *, is_stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "nano",
        "messages": [{"role": "user", "content": "What is 12 + 30?"}],
        "max_tokens": num_tokens,
        "logit_bias": {str(eos_id): -100},
        "repetition_stop_tokens": 0,
        "stream": is_stream,
    }
    if is_stream:
        body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
    return body


def streamed(url: str, body: dict[str, Any]) -> dict[str, Any]:
    num_ids, usage, name, silence_s = 0, None, "", 0.0
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=3600) as answer:
        answer.raise_for_status()
        last = time.monotonic()
        for line in answer.iter_lines():
            silence_s, last = max(silence_s, time.monotonic() - last), time.monotonic()
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            name, usage = chunk["id"], chunk.get("usage") or usage
            for choice in chunk["choices"]:
                num_ids += len(choice.get("token_ids") or [])
    return {"id": name, "token_ids": num_ids, "usage": usage, "longest_silence_s": silence_s}


def whole(url: str, body: dict[str, Any]) -> dict[str, Any]:
    pieces: list[bytes] = []
    silence_s = 0.0
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=3600) as answer:
        answer.raise_for_status()
        last = time.monotonic()
        for piece in answer.iter_raw():
            silence_s, last = max(silence_s, time.monotonic() - last), time.monotonic()
            pieces.append(piece)
    said = json.loads(b"".join(pieces))
    return {
        "id": said["id"],
        "finish_reason": said["choices"][0]["finish_reason"],
        "usage": said["usage"],
        "longest_silence_s": silence_s,
        "keep_alives": sum(not piece.strip() for piece in pieces),
    }


def ledger_tokens(home: Path, completion_id: str) -> int | None:
    find = "SELECT num_completion FROM turns WHERE request_id = ?"
    deadline = time.monotonic() + LEDGER_S
    while time.monotonic() < deadline:
        with closing(sqlite3.connect(f"file:{home / 'm1serve.db'}?mode=ro", uri=True)) as store:
            rows = store.execute(find, (completion_id.partition("-")[2],)).fetchall()
        if rows:
            return int(rows[0][0])
        time.sleep(0.5)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=81_920)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    eos_id = read_config(Settings().model_dir).eos_token_id
    assert eos_id is not None, "nano's config names its end of sentence"
    result: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "cores": os.cpu_count(),
        "tokens": chosen.tokens,
    }
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        process, url = start(root, chosen.tokens)
        try:
            for name, ask in (("stream", streamed), ("whole", whole)):
                body = body_of(chosen.tokens, eos_id, is_stream=name == "stream")
                begin = time.perf_counter()
                with Memory(root / "home") as memory:
                    said = ask(url, body)
                seconds = time.perf_counter() - begin
                said["ledger_tokens"] = ledger_tokens(root / "home", said.pop("id"))
                result[name] = {"seconds": seconds, **said, "memory": memory.summary()}
                print(json.dumps(result[name]), file=sys.stderr)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
    text = json.dumps(result, indent=1) + "\n"
    print(text) if chosen.out is None else chosen.out.write_text(text)


if __name__ == "__main__":
    main()
