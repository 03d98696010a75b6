"""Section D of docs/public-bugs.md: what a stream holds, and that it goes on."""

import asyncio
import json
from typing import Any

import httpx
import pytest

USER: Any = {"role": "user", "content": "u"}


async def events(world: Any, **more: Any) -> list[Any]:
    """The stream's data lines as they are on the wire."""
    body = {"model": "fake", "messages": [USER], "stream": True, **more}
    async with httpx.AsyncClient(verify=False) as http:
        answer = await http.post(f"{world.url}/v1/chat/completions", json=body)
    lines = [line for line in answer.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_usage_is_not_sent_unasked(serve: Any, options: Any) -> None:
    """D1: Arthur-Ficial/apfel#100."""
    async with serve() as world:
        chunks = await events(world, stream_options=options)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


async def test_usage_comes_once_last_and_with_empty_choices(serve: Any) -> None:
    """D2, D3: ROCm/ATOM#1711; cline/cline#8384; anomalyco/opencode#42918;
    microsoft/autogen#5078."""
    async with serve("<think>\nhm\n</think>\nHi") as world:
        chunks = await events(world, stream_options={"include_usage": True})
    *before, last = chunks
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] > 0
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in before)
    for chunk in chunks:
        assert chunk["id"]
        assert chunk["model"] == "fake"
        assert chunk["object"] == "chat.completion.chunk"
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    # nothing between the first and the last chunk of a choice is empty
    assert all(any(chunk["choices"][0]["delta"].values()) for chunk in before[1:-1])


async def test_no_character_breaks_an_event_in_two(serve: Any, ask: Any) -> None:
    """D3's kind: httpx reads lines as str.splitlines does, which knows more than line feeds."""
    text = "a\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r\nb"
    async with serve(f"<think>\n{text}\n</think>\n{text}") as world:
        chunks = await events(world)
        told = await ask(world, stream=True)
    content = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert content == told.content == text
    assert told.reasoning == text


async def test_reasoning_tokens_are_exact(serve: Any, ask: Any) -> None:
    """D5: BerriAI/litellm#41849; sgl-project/sglang#15660; vllm-project/vllm-ascend#13070."""
    thought = "<think>\nhm, 🙂\n</think>"
    async with serve(f"{thought}\nHi") as world:
        expected = len(world.tok.encode_control(thought))
        for step in (1, 2, 3, 7, 1000):
            world.engine.step = step
            for is_stream in (False, True):
                usage = (await ask(world, stream=is_stream)).usage
                assert usage.completion_tokens_details.reasoning_tokens == expected
                assert usage.completion_tokens == expected + len("\nHi") + 1


STOPPED = {
    "over tokens": ("the brown fox", "own fox", "the br"),
    "a beginning that was none": ("own own fox", "own fox", "own "),
    "behind thinking": ("<think>\na\n</think>\nABCDEFGHIJK", "DEFGHIJ", "ABC"),
    "in thinking": ("<think>\nthe brown fox\n</think>\nHi", "own fox", ""),
    "in JSON": ('{"a": "x", "b": "END"}', '"END', '{"a": "x", "b": '),
    "of several bytes": ("ab🙂é!", "🙂é", "ab"),
}


@pytest.mark.parametrize("name", STOPPED)
async def test_nothing_of_a_stop_string_is_ever_sent(serve: Any, ask: Any, name: str) -> None:
    """D7: vllm-project/vllm#3574; SharpAI/SwiftLM#126, #133; mzau/mlx-knife#68."""
    text, stop, content = STOPPED[name]
    async with serve(text) as world:
        for step in (1, 2, 3, 1000):
            world.engine.step = step
            for is_stream in (False, True):
                told = await ask(world, stream=is_stream, stop=[stop, "never said"])
                assert (told.content or "") == content
                assert told.finish == "stop"
                assert stop[:3] not in told.reasoning


@pytest.mark.parametrize("step", [1, 2, 1000])
async def test_nor_in_a_text_completion(serve: Any, step: int) -> None:
    """D7: in /v1/completions."""
    async with serve("the brown fox") as world:
        world.engine.step = step
        create = world.client.completions.create
        answer = await create(model="fake", prompt="x", stop="own fox")
        chunks = await create(model="fake", prompt="x", stop="own fox", stream=True)
        text = "".join([c.choices[0].text async for c in chunks if c.choices])
    assert answer.choices[0].text == text == "the br"
    assert answer.choices[0].finish_reason == "stop"


async def test_headers_come_at_once_and_silence_is_filled(serve: Any) -> None:
    """D9, D10: ggml-org/llama.cpp#24013; antirez/ds4#151, #222, #1006;
    NousResearch/hermes-agent#112207; openai/openai-python#399."""
    async with serve("Hi", serve={"keep_alive_s": 0.02}) as world:
        world.engine.before_start_s = 0.3
        body = {"model": "fake", "messages": [USER], "stream": True}
        async with (
            httpx.AsyncClient(verify=False) as http,
            http.stream("POST", f"{world.url}/v1/chat/completions", json=body) as answer,
        ):
            assert answer.status_code == 200
            assert not world.turns
            lines = [line async for line in answer.aiter_lines() if line]
    assert lines[:5] == [": keep-alive"] * 5
    assert lines[-1] == "data: [DONE]"
    assert type(world.settings)().serve.keep_alive_s <= 10


async def test_a_stream_that_fails_says_so(serve: Any) -> None:
    """D10: lmstudio-ai/lmstudio-bug-tracker#944: an error event, never a silent end."""
    async with serve("word " * 10) as world:
        world.engine.fails_after = 6
        body = {"model": "fake", "messages": [USER], "stream": True}
        async with httpx.AsyncClient(verify=False) as http:
            answer = await http.post(f"{world.url}/v1/chat/completions", json=body)
    last = [line for line in answer.text.splitlines() if line][-1]
    assert set(json.loads(last.removeprefix("data: "))) == {"error"}
    assert '"finish_reason":"' not in answer.text


async def test_none_of_two_hundred_streams_fails(serve: Any, ask: Any) -> None:
    """D11: sgl-project/sglang#17031."""
    async with serve("abc" * 10) as world:
        world.engine.delay_s = 0.001
        told = await asyncio.gather(*(ask(world, stream=True) for _ in range(200)))
        assert not world.engine.running
    assert {(one.content, one.finish) for one in told} == {("abc" * 10, "stop")}
