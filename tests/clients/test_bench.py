"""The load generator: its plan and report as numbers, and whole runs against a small server."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.responses import Response

from m1serve.clients.bench import main
from m1serve.clients.load_plan import LoadPlan, arrivals_s, shots
from m1serve.clients.load_report import Answer, percentiles_ms, summary
from m1serve.errors import ConfigError

CLOSED = LoadPlan(duration_s=1.0, concurrency=4)
OPEN = LoadPlan(duration_s=50.0, rate=20.0)


def test_the_same_seed_makes_the_same_load_and_no_prompt_comes_twice() -> None:
    first = list(itertools.islice(shots(CLOSED), 500))
    assert first == list(itertools.islice(shots(CLOSED), 500))
    assert len({shot.prompt for shot in first}) == 500
    assert first != list(itertools.islice(shots(replace(CLOSED, seed=1)), 500))


def test_an_open_loop_has_its_rate_and_ends_with_its_duration() -> None:
    times = list(arrivals_s(OPEN))
    assert times == sorted(times)
    assert times[-1] < 50.0
    # a Poisson process of 1000: five standard deviations
    assert 842 < len(times) < 1158


def test_the_asked_share_is_aborted_within_the_asked_time() -> None:
    plan = replace(CLOSED, abort_fraction=0.25, abort_within_s=3.0)
    moments = [shot.abort_after_s for shot in itertools.islice(shots(plan), 2000)]
    aborted = [moment for moment in moments if moment is not None]
    assert 400 < len(aborted) < 600
    assert 0 <= min(aborted) < 0.1 < 2.9 < max(aborted) <= 3.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"concurrency": None}, "give exactly one"),
        ({"rate": 3.0}, "give exactly one"),
        ({"concurrency": 0}, "--concurrency is 0"),
        ({"duration_s": float("nan")}, "--duration is nan"),
        ({"max_tokens": -1}, "--max-tokens is -1"),
        ({"abort_fraction": 1.5}, "--abort-fraction is 1.5"),
        ({"concurrency": None, "rate": 1e9}, "ask for fewer"),
    ],
)
def test_a_load_that_cannot_be_made_is_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CLOSED, **change)  # type: ignore[arg-type]


def test_percentiles_and_throughput_are_those_of_the_answers() -> None:
    done = [
        Answer(
            outcome="done",
            started_s=0.0,
            total_s=n / 100,
            ttft_s=n / 1000,
            gaps_s=(0.01, 0.03),
            prompt_tokens=7,
            completion_tokens=5,
        )
        for n in range(1, 102)
    ]
    other = [
        Answer(outcome="aborted", started_s=0.0, total_s=9.0),
        Answer(outcome="error", started_s=0.0, total_s=9.0, error="503"),
    ]
    report = summary(CLOSED, [*done, *other], took_s=2.0)
    assert (report["requests"], report["done"], report["aborted"]) == (103, 101, 1)
    assert report["errors"] == {"503": 1}
    assert report["requests_per_s"] == 50.5
    assert report["completion_tokens_per_s"] == 252.5
    ttft = {"p50": 51.0, "p90": 91.0, "p99": 100.0, "mean": 51.0, "num": 101}
    assert report["ttft_ms"] == ttft
    # two gaps over the four tokens after the first
    assert report["inter_token_ms"] == {"p50": 10.0, "p90": 10.0, "p99": 10.0, "mean": 10.0} | {
        "num": 101
    }
    assert percentiles_ms([]) is None


class SmallServer:
    """Streams `pieces` pieces; every `fails_each`-th request gets a 503, or breaks off."""

    def __init__(self) -> None:
        self.pieces, self.pause_s = 4, 0.002
        self.fails_each = 0
        self.breaks_each = 0
        self.num_requests = self.num_open = self.max_open = 0
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/chat/completions")(self.complete)

    async def models(self) -> JSONResponse:
        return JSONResponse({"data": [{"id": "small"}]})

    async def complete(self, request: Request) -> Response:
        self.num_requests += 1
        if self.fails_each and self.num_requests % self.fails_each == 0:
            return JSONResponse({"error": {"message": "full"}}, status_code=503)
        body = await request.json()
        assert body["model"] == "small"
        is_broken = bool(self.breaks_each and self.num_requests % self.breaks_each == 0)
        return StreamingResponse(self.stream(is_broken), media_type="text/event-stream")

    async def stream(self, is_broken: bool) -> AsyncIterator[str]:
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            yield event({"role": "assistant", "content": ""})
            for _ in range(self.pieces):
                await asyncio.sleep(self.pause_s)
                yield event({"content": "a\u2028b"})
            if is_broken:
                yield 'data: {"error": {"message": "broken"}}\n\n'
                return
            yield event({}, "stop")
            usage = {"prompt_tokens": 11, "completion_tokens": self.pieces}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
        finally:
            self.num_open -= 1


def event(delta: dict[str, str], finish_reason: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\n\n"


@asynccontextmanager
async def serving(small: SmallServer) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(small.app, log_level="error", lifespan="off"))
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            await running


async def run(small: SmallServer, out: Path, *flags: str) -> tuple[int, dict[str, object]]:
    async with serving(small) as url:
        arguments = ["--base-url", url, "--out", str(out), *flags]
        code = await asyncio.to_thread(main, arguments)
    return code, json.loads(await asyncio.to_thread(out.read_text))


async def test_a_closed_loop_keeps_its_concurrency_and_writes_figures_and_a_plot(
    tmp_path: Path,
) -> None:
    small = SmallServer()
    out = tmp_path / "load.json"
    code, report = await run(small, out, "--concurrency", "3", "--duration", "0.3")
    assert code == 0
    assert small.max_open == 3
    assert report["done"] == report["requests"] == small.num_requests > 3
    assert report["errors"] == {}
    for name in ("ttft_ms", "inter_token_ms", "between_pieces_ms", "end_to_end_ms"):
        figures = report[name]
        assert isinstance(figures, dict)
        assert 0 < figures["p50"] <= figures["p90"] <= figures["p99"]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "--concurrency 3" in str(report["command"])


async def test_an_open_loop_begins_requests_whatever_became_of_those_before(
    tmp_path: Path,
) -> None:
    small = SmallServer()
    small.pause_s = 0.2
    out = tmp_path / "load.json"
    code, report = await run(small, out, "--rate", "100", "--duration", "0.3", "--seed", "3")
    expected = sum(1 for _ in arrivals_s(LoadPlan(duration_s=0.3, rate=100, seed=3)))
    assert code == 0
    assert report["requests"] == report["done"] == expected
    assert small.max_open == expected


async def test_failures_are_counted_by_what_they_were(tmp_path: Path) -> None:
    small = SmallServer()
    small.fails_each, small.breaks_each = 3, 4
    code, report = await run(
        small, tmp_path / "load.json", "--concurrency", "1", "--duration", "0.3"
    )
    assert code == 1
    num = small.num_requests
    broken = sum(n % 4 == 0 and n % 3 != 0 for n in range(1, num + 1))
    assert report["errors"] == {"503": num // 3, "an error inside the stream": broken}
    assert report["done"] == num - num // 3 - broken


async def test_aborted_requests_close_their_connection(tmp_path: Path) -> None:
    small = SmallServer()
    small.pause_s = 30.0
    flags = ("--concurrency", "5", "--duration", "0.2")
    aborts = ("--abort-fraction", "1", "--abort-within", "0.2")
    code, report = await run(small, tmp_path / "load.json", *flags, *aborts)
    assert code == 0
    assert report["aborted"] == report["requests"]
    assert small.num_open == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--base-url", "localhost:1"], "--base-url is 'localhost:1'"),
        (["--base-url", "http://127.0.0.1:1/v1"], "names no model (ConnectError"),
        (["--base-url", "http://127.0.0.1:1/v1", "--rate", "-2"], "--rate is -2.0"),
        (["--base-url", "http://127.0.0.1:1/v1", "--out", "no/f.json"], "--out is no/f.json"),
    ],
)
def test_bad_input_is_an_error_that_says_what_to_do(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = [] if "--rate" in flags else ["--concurrency", "1"]
    out = [] if "--out" in flags else ["--out", str(tmp_path / "load.json")]
    assert main([*flags, *loop, *out]) == 2
    assert message in capsys.readouterr().err


async def test_the_key_is_not_in_the_report(tmp_path: Path) -> None:
    flags = ("--concurrency", "1", "--duration", "0.05", "--api-key", "sk-secret")
    _, report = await run(SmallServer(), tmp_path / "load.json", *flags)
    assert "sk-secret" not in json.dumps(report)
