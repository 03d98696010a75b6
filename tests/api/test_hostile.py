"""Hostile bodies and connections one by one: a 400 that says what to do, and the server goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

HI: Any = [{"role": "user", "content": "Hi"}]
NAMED = b'{"model": "fake", "messages": [{"role": "user", "content": "Hi"}]'


async def refused(world: Any, body: bytes) -> dict[str, Any]:
    """The error of a 400; the server answers an ordinary request afterwards."""
    async with httpx.AsyncClient(verify=False, base_url=world.url, timeout=30) as http:
        answer = await http.post("/v1/chat/completions", content=body)
        fine = await http.post("/v1/chat/completions", json={"model": "fake", "messages": HI})
    assert answer.status_code == 400, answer.text[:500]
    assert answer.headers["x-should-retry"] == "false"
    assert fine.status_code == 200
    assert world.engine.running == set()
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999"])
@pytest.mark.parametrize("field", [b"temperature", b"top_p", b"frequency_penalty", b"n", b"seed"])
async def test_numbers_that_are_none_are_refused(serve: Any, field: bytes, number: bytes) -> None:
    async with serve() as world:
        await refused(world, NAMED + b', "' + field + b'": ' + number + b"}")


@pytest.mark.parametrize("n", [65, 2**31, 2**63, 2**64, 10**300])
async def test_a_huge_n_is_refused_by_name(serve: Any, n: int) -> None:
    async with serve() as world:
        error = await refused(world, NAMED + b', "n": %d}' % n)
    assert error["param"] == "n" or error["param"] is None


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**31, 2**63, 2**64])
async def test_ids_outside_the_vocabulary_are_refused(serve: Any, token_id: int) -> None:
    async with serve() as world:
        stop = await refused(world, NAMED + b', "stop_token_ids": [%d]}' % token_id)
        bias = await refused(world, NAMED + b', "logit_bias": {"%d": 1}}' % token_id)
        prompt = json.dumps({"model": "fake", "prompt": [token_id]}).encode()
        async with httpx.AsyncClient(verify=False) as http:
            completion = await http.post(f"{world.url}/v1/completions", content=prompt)
    assert stop["param"].startswith("stop_token_ids")
    assert bias["param"] == "logit_bias"
    assert completion.status_code == 400


@pytest.mark.parametrize(
    "text", [b'"\\ud800"', b'"a\\udfffb"', b'"\\udc00\\ud800"', b'"\xed\xa0\x80"']
)
@pytest.mark.parametrize("place", ["content", "name", "model", "stop", "metadata", "tool"])
async def test_a_lone_surrogate_is_refused_wherever_it_stands(
    serve: Any, place: str, text: bytes
) -> None:
    bodies = {
        "content": b'{"model": "fake", "messages": [{"role": "user", "content": %s}]}',
        "name": b'{"model": "fake", "messages": [{"role": "user", "content": "", "name": %s}]}',
        "model": b'{"model": %s, "messages": [{"role": "user", "content": "Hi"}]}',
        "stop": NAMED + b', "stop": [%s]}',
        "metadata": NAMED + b', "metadata": {"task_id": %s}}',
        "tool": NAMED + b', "tools": [{"type": "function", "function": {"name": %s}}]}',
    }
    async with serve() as world:
        await refused(world, bodies[place] % text)


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xfe{}",
        b"\x00",
        b'{"model": "fake", "messages": "\xff"}',
        NAMED.decode().encode("utf-16") + b"}",
        NAMED + b', "user": "\xc0\xaf"}',
    ],
)
async def test_bytes_that_are_no_utf8_are_refused(serve: Any, body: bytes) -> None:
    async with serve() as world:
        await refused(world, body)


@pytest.mark.parametrize("depth", [500, 5_000, 500_000])
@pytest.mark.parametrize("brackets", [(b"[", b"]"), (b'{"a":', b"}")])
async def test_deep_nesting_is_refused(
    serve: Any, depth: int, brackets: tuple[bytes, bytes]
) -> None:
    """In a field with a type of its own, and as a whole body; the bracket may never close."""
    opening, closing = brackets
    deep = opening * depth + b"1" + closing * depth
    async with serve() as world:
        await refused(world, deep)
        await refused(world, opening * depth)
        await refused(world, NAMED + b', "stop": ' + deep + b"}")


@pytest.mark.parametrize("value", [None, True, 1, 1.5, "x", [], [None], {}, {"a": 1}, [[1]], [{}]])
async def test_wrong_types_everywhere_are_no_server_error(serve: Any, value: object) -> None:
    """Whether null or an empty list is fine depends on the field; nothing may break."""
    fields = (
        *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format"),
        *("stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "stop", "seed"),
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "logit_bias", "logprobs", "top_logprobs", "store", "metadata"),
        *("user", "stop_token_ids", "return_token_ids", "functions", "function_call", "audio"),
        *("modalities", "reasoning_effort", "service_tier", "unknown", "reasoning_budget"),
        *("repetition_stop_tokens", "repetition_stop_probability"),
    )
    async with serve() as world, httpx.AsyncClient(verify=False, base_url=world.url) as http:
        for field in fields:
            body = {"model": "fake", "messages": HI, field: value}
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code in (200, 400, 404), f"{field}: {answer.text}"
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]
        assert world.engine.running == set()


async def test_of_duplicate_keys_one_is_taken_and_nothing_breaks(serve: Any) -> None:
    async with serve() as world, httpx.AsyncClient(verify=False) as http:
        body = b'{"n": 1, "n": 2, "model": "x", ' + NAMED[1:] + b', "n": 3}'
        answer = await http.post(f"{world.url}/v1/chat/completions", content=body)
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == 3


async def test_giant_strings_are_refused_as_too_long_for_the_model(serve: Any) -> None:
    async with serve() as world:
        text = b"word " * 10**6
        body = b'{"model": "fake", "messages": [{"role": "user", "content": "' + text + b'"}]}'
        error = await refused(world, body)
        stop = await refused(world, NAMED + b', "stop": "' + text + b'"}')
    assert error["code"] == "context_length_exceeded"
    assert stop["param"] == "stop"
    # the message does not repeat what was sent
    assert len(error["message"]) < 1000 > len(stop["message"])


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nconnection: close\r\n"
BODY = NAMED + b"}"


async def over_a_socket(world: Any, *pieces: bytes, is_closed: bool = False) -> bytes:
    """The server's answer, or what came of it until it or we closed."""
    port = int(world.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.02)
    try:
        if is_closed:
            return b""
        return await asyncio.wait_for(reader.read(-1), 5)
    finally:
        writer.close()


async def test_a_body_that_comes_byte_by_byte_is_answered(serve: Any) -> None:
    async with serve() as world:
        head = HEAD + b"content-length: %d\r\n\r\n" % len(BODY)
        answer = await over_a_socket(world, head, *(BODY[n : n + 7] for n in range(0, 70, 7)))
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("length", [b"-1", b"1e3", b"abc", b"", b"9" * 40])
async def test_a_length_that_is_none_is_a_400(serve: Any, length: bytes) -> None:
    async with serve() as world:
        answer = await over_a_socket(world, HEAD + b"content-length: " + length + b"\r\n\r\n", BODY)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")


async def test_a_body_shorter_than_its_length_keeps_nothing_open(
    serve: Any, eventually: Any
) -> None:
    async with serve() as world:
        head = HEAD + b"content-length: 5000\r\n\r\n"
        await over_a_socket(world, head, BODY, is_closed=True)
        async with httpx.AsyncClient(verify=False, base_url=world.url) as http:
            answer = await http.post("/v1/chat/completions", json={"model": "fake", "messages": HI})
        await eventually(lambda: not world.engine.running)
    assert answer.status_code == 200
    assert len(world.engine.requests) == 1


async def test_a_body_longer_than_its_length_is_cut_there(serve: Any) -> None:
    async with serve() as world:
        head = HEAD + b"content-length: %d\r\n\r\n" % (len(BODY) - 1)
        answer = await over_a_socket(world, head, BODY)
    assert answer.startswith(b"HTTP/1.1 400")
    assert world.engine.requests == []
