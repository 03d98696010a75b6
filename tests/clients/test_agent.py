"""The agent against a small fake of the chat endpoint, over a real loopback socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from m1serve.clients.agent import Agent, EpisodePlan
from m1serve.types import Mode


class FakeServer:
    """Calls `get_order` in the first turn of a session and answers in the second."""

    def __init__(self, *, num_failures: int = 0, arguments: str = '{"order_id": 7728}') -> None:
        self.bodies: list[dict[str, object]] = []
        self.headers: list[dict[str, str]] = []
        self.ended: list[str] = []
        self.num_running = 0
        self.max_running = 0
        self._num_failures = num_failures
        self._arguments = arguments
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self.complete)
        self.app.post("/v1/sessions/{session_id}/end")(self.end)

    async def complete(self, request: Request) -> JSONResponse:
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        body = await request.json()
        await asyncio.sleep(0.005)
        self.num_running -= 1
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if len(self.bodies) <= self._num_failures:
            return JSONResponse({"error": {"message": "out of order"}}, status_code=500)
        is_first = len(body["messages"]) == 2
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_order", "arguments": self._arguments},
        }
        said = {"role": "assistant", "content": "" if is_first else "It is on its way."}
        message = said | ({"tool_calls": [call]} if is_first else {})
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return JSONResponse(
            {
                "id": "c",
                "object": "chat.completion",
                "created": 0,
                "model": "nano",
                "choices": [choice],
                "usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12},
            }
        )

    async def end(self, session_id: str) -> JSONResponse:
        self.ended.append(session_id)
        return JSONResponse({"session_id": session_id, "ended": True})


@asynccontextmanager
async def playing(server: FakeServer, *, concurrency: int = 4) -> AsyncIterator[Agent]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(server.app, log_level="warning", lifespan="off")
    program = uvicorn.Server(config)
    task = asyncio.create_task(program.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    agent = Agent(url, model="nano", concurrency=concurrency)
    try:
        yield agent
    finally:
        await agent.close()
        program.should_exit = True
        await task


def plan(number: int = 0) -> EpisodePlan:
    return EpisodePlan(
        task_id="lookup/report/0", session_id=f"s{number}", group_key="g1", mode=Mode.TRAIN
    )


async def test_an_episode_runs_tools_until_an_answer_without_calls() -> None:
    server = FakeServer()
    async with playing(server) as agent:
        played = await agent.play(plan())
    assert played.num_requests == 2
    assert played.failures == ()
    assert played.num_completion_tokens == 14
    roles = [message["role"] for message in played.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert played.messages[3]["tool_call_id"] == "call_1"
    assert "7728" in str(played.messages[3]["content"])
    assert server.ended == ["s0"]


async def test_every_request_names_session_group_task_and_mode() -> None:
    server = FakeServer()
    async with playing(server) as agent:
        await agent.play(plan(3))
    for headers in server.headers:
        assert headers["x-m1-session-id"] == "s3"
        assert headers["x-m1-group-id"] == "g1"
        assert headers["x-m1-task-id"] == "lookup/report/0"
        assert headers["x-m1-mode"] == "train"


async def test_the_answer_is_replayed_with_its_tool_result() -> None:
    server = FakeServer()
    async with playing(server) as agent:
        await agent.play(plan())
    messages = server.bodies[1]["messages"]
    assert isinstance(messages, list)
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == '{"order_id": 7728}'
    assert json.dumps(server.bodies[0]["tools"]).count('"type": "function"') == 5


async def test_a_failed_request_is_counted_and_ends_only_its_episode() -> None:
    server = FakeServer(num_failures=1)
    async with playing(server, concurrency=1) as agent:
        played = await agent.play_all([plan(0), plan(1)])
    assert [len(p.failures) for p in played] == [1, 0]
    assert "InternalServerError" in played[0].failures[0]
    assert server.ended == ["s0", "s1"]


async def test_no_more_episodes_run_at_once_than_allowed() -> None:
    server = FakeServer()
    async with playing(server, concurrency=3) as agent:
        played = await agent.play_all([plan(n) for n in range(12)])
    assert [p.plan.session_id for p in played] == [f"s{n}" for n in range(12)]
    assert server.max_running == 3


async def test_arguments_that_are_no_object_are_answered_as_an_error() -> None:
    server = FakeServer(arguments="[1, 2]")
    async with playing(server) as agent:
        played = await agent.play(plan())
    assert played.messages[3]["content"] == "error: arguments are not a JSON object"


async def test_an_unreachable_server_is_a_failure_not_an_exception() -> None:
    agent = Agent("http://127.0.0.1:9/v1", model="nano")
    played = await agent.play(plan())
    await agent.close()
    assert len(played.failures) == 2
    assert "APIConnectionError" in played.failures[0]
