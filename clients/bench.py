"""Load for any OpenAI-compatible server, over HTTP: open or closed loop, with aborts.

python -m m1serve.clients.bench --base-url http://127.0.0.1:8000/v1 --rate 20 --duration 30 --out f
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shlex
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx

from m1serve.clients.load_plan import LoadPlan, Shot, arrivals_s, shots
from m1serve.clients.load_report import Answer, summary
from m1serve.errors import ConfigError, M1ServeError

_PIECES = ("reasoning_content", "reasoning", "content", "tool_calls")


class _BrokenError(Exception):
    """The answer was none: its text is how the report counts it."""


class Load:
    """Runs one plan against one server."""

    def __init__(self, http: httpx.AsyncClient, plan: LoadPlan, *, model: str) -> None:
        """`http` has the base URL and the key."""
        self._http, self._plan, self._model = http, plan, model
        self._began = 0.0
        self.answers: list[Answer] = []

    async def run(self) -> float:
        """Fills `answers`; returns the seconds to the last byte."""
        self._began = time.perf_counter()
        loop = self._open_loop if self._plan.is_open_loop else self._closed_loop
        await loop(shots(self._plan))
        return time.perf_counter() - self._began

    async def _open_loop(self, coming: Iterator[Shot]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for at in arrivals_s(self._plan):
                await asyncio.sleep(max(0.0, at - self._now))
                tasks.create_task(self._fire(next(coming), planned_s=at))

    async def _closed_loop(self, coming: Iterator[Shot]) -> None:
        async def user() -> None:
            while self._now < self._plan.duration_s:
                await self._fire(next(coming), planned_s=self._now)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._plan.concurrency or 0):
                tasks.create_task(user())

    @property
    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _fire(self, shot: Shot, *, planned_s: float) -> None:
        reading = _Reading(started_s=self._now, planned_s=planned_s)
        try:
            async with asyncio.timeout(shot.abort_after_s):
                await self._read(shot, reading)
        except TimeoutError:
            self.answers.append(reading.end("aborted", self._now))
        except _BrokenError as error:
            self.answers.append(reading.end("error", self._now, str(error)))
        except httpx.HTTPError as error:
            self.answers.append(reading.end("error", self._now, type(error).__name__))
        else:
            self.answers.append(reading.end("done", self._now))

    async def _read(self, shot: Shot, reading: _Reading) -> None:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": shot.prompt}],
            "max_tokens": self._plan.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with self._http.stream("POST", "chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise _BrokenError(str(answer.status_code))
            async for event in _events(answer):
                reading.take(event, self._now)
        if not reading.is_finished:
            raise _BrokenError("the stream ended without a finish reason")


class _Reading:
    """One answer while it comes."""

    def __init__(self, *, started_s: float, planned_s: float) -> None:
        self.is_finished = False
        self._started_s, self._planned_s = started_s, planned_s
        self._times: list[float] = []
        self._prompt_tokens = self._completion_tokens = 0

    def take(self, event: dict[str, object], now_s: float) -> None:
        if "error" in event:
            raise _BrokenError("an error inside the stream")
        match event.get("usage"):
            case {"prompt_tokens": int(prompt), "completion_tokens": int(completion)}:
                self._prompt_tokens, self._completion_tokens = prompt, completion
        match event.get("choices"):
            case [{"delta": dict(delta), **more}, *_]:
                if any(delta.get(name) for name in _PIECES):
                    self._times.append(now_s - self._started_s)
                self.is_finished = self.is_finished or bool(more.get("finish_reason"))

    def end(self, outcome: str, now_s: float, error: str | None = None) -> Answer:
        times = self._times
        return Answer(
            outcome=outcome,  # type: ignore[arg-type]
            started_s=self._started_s,
            total_s=now_s - self._started_s,
            late_s=max(0.0, self._started_s - self._planned_s),
            error=error,
            ttft_s=times[0] if times else None,
            gaps_s=tuple(b - a for a, b in itertools.pairwise(times)),
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
        )


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, object]]:
    """Not httpx's lines: they end at characters that JSON may hold."""
    rest = b""
    async for piece in answer.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data and data != b"[DONE]":
                try:
                    yield json.loads(data)
                except ValueError:
                    raise _BrokenError("an event that is no JSON") from None


async def first_model(http: httpx.AsyncClient) -> str:
    """Raises ConfigError when the server names none."""
    try:
        answer = (await http.get("models")).raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
        raise ConfigError(
            f"{http.base_url}models names no model ({type(error).__name__}: {error}); is "
            "--base-url right, with its /v1? --api-key? Or name the model with --model"
        ) from None


async def measure(options: argparse.Namespace, plan: LoadPlan) -> tuple[Load, float]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"authorization": f"Bearer {options.api_key}"}
    async with httpx.AsyncClient(
        base_url=options.base_url, headers=headers, timeout=plan.timeout_s, limits=limits
    ) as http:
        model = options.model or await first_model(http)
        load = Load(http, plan, model=model)
        return load, await load.run()


def parse(arguments: list[str]) -> tuple[argparse.Namespace, LoadPlan]:
    """Raises ConfigError for what no load can be made of."""
    parser = argparse.ArgumentParser(prog="m1serve.clients.bench", description=__doc__)
    parser.add_argument("--base-url", required=True, help="http://HOST:PORT/v1")
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--rate", type=float, help="open loop: requests a second")
    parser.add_argument("--concurrency", type=int, help="closed loop: requests at once")
    parser.add_argument("--duration", type=float, default=30.0, help="seconds of new requests")
    parser.add_argument("--prompt-words", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--abort-fraction", type=float, default=0.0, help="0 to 1")
    parser.add_argument("--abort-within", type=float, default=2.0, help="seconds after the start")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds without a byte")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON; a .png appears beside it")
    options = parser.parse_args(arguments)
    if not options.base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url is {options.base_url!r}; wanted http://HOST:PORT/v1")
    if options.out.suffix != ".json" or not options.out.parent.is_dir():
        raise ConfigError(f"--out is {options.out}; wanted a .json in a directory that exists")
    plan = LoadPlan(
        duration_s=options.duration,
        rate=options.rate,
        concurrency=options.concurrency,
        prompt_words=options.prompt_words,
        max_tokens=options.max_tokens,
        abort_fraction=options.abort_fraction,
        abort_within_s=options.abort_within,
        timeout_s=options.timeout,
        seed=options.seed,
    )
    return options, plan


def _command(arguments: list[str], api_key: str) -> str:
    """As it was given, but the key, which is nobody's business."""
    command = shlex.join(["python", "-m", "m1serve.clients.bench", *arguments])
    return command if api_key == "none" else command.replace(shlex.quote(api_key), "KEY")


def main(arguments: list[str]) -> int:
    """Returns 2 for bad input, 1 when a request failed."""
    from m1serve.clients.load_plot import save_plot

    try:
        options, plan = parse(arguments)
        load, took_s = asyncio.run(measure(options, plan))
    except M1ServeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = summary(plan, load.answers, took_s=took_s)
    text = json.dumps({"command": _command(arguments, options.api_key), **report}, indent=1)
    options.out.write_text(text + "\n")
    loop = f"{plan.rate:g} requests/s" if plan.rate else f"{plan.concurrency} at once"
    save_plot(options.out.with_suffix(".png"), f"{loop}, {plan.max_tokens} tokens", load.answers)
    print(text)
    return 1 if report["errors"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
