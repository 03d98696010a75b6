"""Clients that leave, clients that wait, and many at once."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.types import StopCause

HI: Any = [{"role": "user", "content": "Hi"}]
LONG = "word " * 400


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_frees_its_slot_and_is_recorded_as_aborted(
    serve: Any, eventually: Any, is_stream: bool
) -> None:
    async with serve(LONG) as world:
        world.engine.delay_s = 0.005
        async with httpx.AsyncClient(verify=False) as http:
            asking = asyncio.create_task(
                http.post(
                    f"{world.url}/v1/chat/completions",
                    json={"model": "fake", "messages": HI, "stream": is_stream},
                )
            )
            await eventually(lambda: world.engine.running)
            await asyncio.sleep(0.05)
            asking.cancel()
        await eventually(lambda: not world.engine.running and world.turns)
        [turn] = world.turns
        [request] = world.engine.requests
        sent = world.engine.sent[request.id, 0]
    assert (turn.stop, turn.was_delivered) == (StopCause.ABORT, False)
    assert turn.completion_ids == tuple(i for delta in sent for i in delta.token_ids)
    assert 0 < len(turn.completion_ids) < len(LONG)


async def test_a_client_that_leaves_the_queue_is_forgotten(serve: Any, eventually: Any) -> None:
    async with serve() as world:
        world.engine.before_start_s = 30
        async with httpx.AsyncClient(verify=False) as http:
            asking = asyncio.create_task(
                http.post(
                    f"{world.url}/v1/chat/completions", json={"model": "fake", "messages": HI}
                )
            )
            await eventually(lambda: world.engine.running)
            asking.cancel()
        await eventually(lambda: not world.engine.running)
        assert world.turns == []


@pytest.mark.parametrize("is_stream", [False, True])
async def test_no_answer_is_whole_before_its_turn_is_written(
    serve: Any, eventually: Any, is_stream: bool
) -> None:
    async with serve() as world:
        waiting: list[Any] = []
        world.journal.when_written = waiting.append
        async with httpx.AsyncClient(verify=False) as http:
            body = {"model": "fake", "messages": HI, "stream": is_stream}
            asking = asyncio.create_task(http.post(f"{world.url}/v1/chat/completions", json=body))
            await eventually(lambda: waiting)
            await asyncio.sleep(0.1)
            assert not asking.done()
            assert [turn.was_delivered for turn in world.turns] == [False]
            waiting[0]()
            assert (await asking).status_code == 200
        assert [turn.was_delivered for turn in world.turns] == [True]


async def test_a_disk_that_hangs_holds_up_no_answer_for_long(serve: Any) -> None:
    async with serve() as world, httpx.AsyncClient(verify=False) as http:
        world.journal.when_written = lambda _: None
        body = {"model": "fake", "messages": HI}
        answer = await http.post(f"{world.url}/v1/chat/completions", json=body, timeout=10)
        assert answer.status_code == 200


async def test_slow_streams_are_kept_alive_by_comments(serve: Any) -> None:
    async with serve("Hi", serve={"keep_alive_s": 0.03}) as world:
        world.engine.before_start_s = 0.2
        async with (
            httpx.AsyncClient(verify=False) as http,
            http.stream(
                "POST",
                f"{world.url}/v1/chat/completions",
                json={"model": "fake", "messages": HI, "stream": True},
            ) as answer,
        ):
            lines = [line async for line in answer.aiter_lines() if line]
    assert lines[0] == lines[1] == ": keep-alive"
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "stop"
    assert lines[-1] == "data: [DONE]"


async def test_a_stream_is_kept_alive_while_text_is_withheld(serve: Any) -> None:
    call = '<tool_calls>\n{"arguments": {"x": "' + "y" * 40 + '"}, "name": "look"}\n</tool_calls>'
    tools = [{"type": "function", "function": {"name": "look"}}]
    body = {"model": "fake", "messages": HI, "stream": True, "tools": tools}
    async with (
        serve(call, serve={"keep_alive_s": 0.03}) as world,
        httpx.AsyncClient(verify=False) as http,
    ):
        # tokens come all the time, but the call's name only at its end
        world.engine.delay_s = 0.01
        answer = await http.post(f"{world.url}/v1/chat/completions", json=body)
    blocks = answer.text.split("\n\n")
    assert '"role":"assistant"' in blocks[0]
    silent = blocks[1 : next(n for n, block in enumerate(blocks) if "tool_calls" in block)]
    assert len(silent) >= 2
    assert set(silent) == {": keep-alive"}


async def test_slow_bodies_are_kept_alive_by_spaces(serve: Any) -> None:
    async with serve("Hi", serve={"keep_alive_s": 0.03}) as world:
        world.engine.before_start_s = 0.2
        answer = await world.client.chat.completions.with_raw_response.create(
            model="fake", messages=HI
        )
    assert answer.text.startswith("  ")
    assert answer.parse().choices[0].message.content == "Hi"


async def test_a_failure_after_spaces_is_an_error_object(serve: Any) -> None:
    async with (
        serve("Hi", serve={"keep_alive_s": 0.03}) as world,
        httpx.AsyncClient(verify=False) as http,
    ):
        world.engine.before_start_s, world.engine.fails_after = 0.1, 0
        answer = await http.post(
            f"{world.url}/v1/chat/completions", json={"model": "fake", "messages": HI}
        )
    assert answer.status_code == 200
    assert "a detail" in answer.json()["error"]["message"]


async def test_many_streams_at_once_do_not_mix(serve: Any) -> None:
    async with serve("abc" * 20) as world:
        world.engine.delay_s = 0.001

        async def one() -> str:
            chunks = await world.client.chat.completions.create(
                model="fake", messages=HI, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        texts = await asyncio.gather(*(one() for _ in range(40)))
        assert set(texts) == {"abc" * 20}
        assert len(world.turns) == 40
        assert not world.engine.running


class WatchedTokenizer(ChatTokenizer):
    """Remembers on which threads it was asked."""

    def __init__(self) -> None:
        super().__init__(byte_tokenizer().to_json())
        self.encoded_on: set[int] = set()
        self.shown_on: set[int] = set()

    def encode_text(self, text: str) -> list[int]:
        self.encoded_on.add(threading.get_ident())
        return super().encode_text(text)

    def token_bytes(self, token_id: int) -> bytes:
        self.shown_on.add(threading.get_ident())
        return super().token_bytes(token_id)


async def test_a_large_body_is_handled_beside_the_loop(serve: Any) -> None:
    tok = WatchedTokenizer()
    async with serve(tok=tok) as world:
        tools: Any = [{"type": "function", "function": {"name": "f", "description": "x" * 3000}}]
        history: Any = [{"role": "user", "content": ""} for _ in range(10)]
        answer = await world.client.chat.completions.create(
            model="fake", messages=history, tools=tools, user="u" * 100_000
        )
    assert answer.choices[0].message.content == "Hello."
    assert threading.get_ident() not in tok.encoded_on


@pytest.mark.parametrize(("n", "is_beside"), [(1, False), (8, True)])
async def test_a_large_answer_is_written_beside_the_loop(
    serve: Any, n: int, is_beside: bool
) -> None:
    tok = WatchedTokenizer()
    async with serve("word " * 40, tok=tok) as world:
        world.engine.step = 1000
        answer = await world.client.chat.completions.create(
            model="fake", messages=HI, n=n, logprobs=True, top_logprobs=10
        )
    assert [len(choice.logprobs.content) for choice in answer.choices] == [200] * n
    assert (tok.shown_on != {threading.get_ident()}) is is_beside
