"""What Ray Serve and capture add to a request: nano over `m1serve up`, with and without each.

    python benchmarks/serve.py [--requests 200] [--max-tokens 4]

Prints one JSON object. One client, one request at a time; requests that are captured (mode train)
and requests that are not (mode off) take turns, so that they meet the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

READY_S = 180.0
MODES = ("train", "off")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(home: Path, *flags: str) -> tuple[subprocess.Popen[bytes], str]:
    """`m1serve up` in a fresh home, and its base URL once it serves."""
    ready = home / "ready.json"
    command = [sys.executable, "-P", "-m", "m1serve.cli", "up", "--home", str(home / "home")]
    ports = ["--port", str(free_port()), "--admin-port", str(free_port())]
    with (home / "up.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *ports, "--ready-file", str(ready), *flags], stdout=log, stderr=log
        )
    deadline = time.monotonic() + READY_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"m1serve up is not ready: {(home / 'up.log').read_text()}")
        time.sleep(0.1)
    return process, str(json.loads(ready.read_text())["url"])


def request_ms(client: httpx.Client, url: str, mode: str, max_tokens: int) -> float:
    body = {
        "model": "nano",
        "messages": [{"role": "user", "content": "What is 12 + 30?"}],
        "max_tokens": max_tokens,
    }
    begin = time.perf_counter()
    answer = client.post(f"{url}/chat/completions", json=body, headers={"X-M1-Mode": mode})
    answer.raise_for_status()
    return (time.perf_counter() - begin) * 1e3


def measure(num_requests: int, max_tokens: int, *flags: str) -> dict[str, float]:
    """p50 and p95 in milliseconds by mode."""
    with tempfile.TemporaryDirectory() as directory:
        process, url = start(Path(directory), *flags)
        url = url if url.endswith("/v1") else f"{url}/v1"
        try:
            times: dict[str, list[float]] = {mode: [] for mode in MODES}
            with httpx.Client(timeout=60) as client:
                for i in range(num_requests + 10):
                    for mode in MODES:
                        took_ms = request_ms(client, url, mode, max_tokens)
                        if i >= 10:
                            times[mode].append(took_ms)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    result = {}
    for mode, took in times.items():
        result[f"{mode}_p50_ms"] = round(statistics.median(took), 3)
        result[f"{mode}_p95_ms"] = round(statistics.quantiles(took, n=20)[-1], 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=4)
    args = parser.parse_args()
    plain = measure(args.requests, args.max_tokens, "--no-ray")
    ray = measure(args.requests, args.max_tokens)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "load": os.getloadavg()[0],
        "uvicorn": plain,
        "ray_serve": ray,
        "ray_serve_adds_p50_ms": round(ray["off_p50_ms"] - plain["off_p50_ms"], 3),
        "capture_adds_p50_ms": round(plain["train_p50_ms"] - plain["off_p50_ms"], 3),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
