"""The stream byte by byte: OpenAI's order, and none of the variants that broke real clients."""

import json
from typing import Any

import httpx
import pytest

from m1serve.errors import EngineError

HI: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
REPLY = (
    "<think>\nhm, one\n</think>\nLet me see.\n<tool_calls>\n"
    '{"name": "look", "arguments": {"x": 1}}\n{"name": "look", "arguments": {"y": [2]}}\n'
    "</tool_calls>"
)
BASE = ("id", "object", "created", "model", "system_fingerprint", "choices")


async def events(world: Any, **more: Any) -> list[str]:
    """The blocks between empty lines."""
    body = {"model": "fake", "messages": HI, "stream": True, **more}
    async with httpx.AsyncClient(verify=False) as http:
        answer = await http.post(f"{world.url}/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text.endswith("\n\n")
    return answer.text.split("\n\n")[:-1]


def parsed(blocks: list[str]) -> list[dict[str, Any]]:
    return [json.loads(block.removeprefix("data: ")) for block in blocks if block[6] == "{"]


async def chunks_of(world: Any, **more: Any) -> list[dict[str, Any]]:
    return parsed(await events(world, **more))


def merged(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours that only go on with the same text are one."""
    whole: list[dict[str, Any]] = []
    for delta in deltas:
        last = whole[-1] if whole else {}
        [key] = delta if len(delta) == 1 else [""]
        if key in ("content", "reasoning_content") and list(last) == [key]:
            whole[-1] = {key: last[key] + delta[key]}
        elif key == "tool_calls" and "id" not in delta[key][0] and key in last:
            before, after = last[key][0], delta[key][0]
            assert before["index"] == after["index"]
            before["function"]["arguments"] += after["function"]["arguments"]
        else:
            whole.append(json.loads(json.dumps(delta)))
    return whole


@pytest.mark.parametrize("step", [1, 3, 1000])
async def test_the_golden_stream(serve: Any, step: int) -> None:
    async with serve(REPLY) as world:
        world.engine.step = step
        blocks = await events(world, tools=TOOLS, stream_options={"include_usage": True})
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    assert blocks.count("data: [DONE]") == 1
    *chunks, finish, usage = parsed(blocks)
    deltas = merged([chunk["choices"][0]["delta"] for chunk in chunks])
    ids = [call["id"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm, one"},
        {"content": "Let me see."},
        named_call(0, ids[0], '{"x": 1}'),
        named_call(1, ids[1], '{"y": [2]}'),
    ]
    assert all("stop_cause" not in chunk["choices"][0] for chunk in chunks)
    ending = {"finish_reason": "tool_calls", "stop_cause": "eos"}
    assert finish["choices"] == [{"index": 0, "delta": {}, "logprobs": None, **ending}]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(world.turns[0].completion_ids)
    assert all(chunk["usage"] is None for chunk in [*chunks, finish])


def named_call(index: int, call_id: str, arguments: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {
        "tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]
    }


async def test_every_chunk_has_the_same_head_and_a_fingerprint(serve: Any) -> None:
    async with serve(REPLY) as world:
        chunks = await chunks_of(world, tools=TOOLS, stream_options={"include_usage": True})
    head = {key: chunks[0][key] for key in BASE if key != "choices"}
    assert head["object"] == "chat.completion.chunk"
    assert head["system_fingerprint"] == "fake@0"
    for chunk in chunks:
        assert {key: chunk[key] for key in head} == head
        assert set(chunk) == {*BASE, "usage"}


@pytest.mark.parametrize("step", [1, 1000])
async def test_no_variant_that_broke_a_client_occurs(serve: Any, step: int) -> None:
    async with serve(REPLY) as world:
        world.engine.step = step
        chunks = await chunks_of(world, tools=TOOLS)
    # no usage chunk when none was asked for, and choices are always a list with one entry
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all(isinstance(choice["delta"], dict) for choice in choices)
    assert [choice["finish_reason"] for choice in choices].count(None) == len(choices) - 1
    assert choices[-1]["finish_reason"] in ("stop", "length", "tool_calls", "content_filter")
    assert choices[-1]["delta"] == {}
    assert ["role" in choice["delta"] for choice in choices].index(False) == 1
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    named = [call for call in calls if "id" in call]
    assert [call["index"] for call in named] == [0, 1]
    assert len({call["id"] for call in named}) == 2
    assert all(call["id"] and call["type"] == "function" for call in named)
    for call in calls:
        assert isinstance(call["function"]["arguments"], str)
        if "id" not in call:
            assert set(call) == {"index", "function"}
            assert set(call["function"]) == {"arguments"}
    # null, as OpenAI sends it nowhere, crashes helpers that test for the key
    assert all(value is not None for choice in choices for value in choice["delta"].values())


async def test_every_choice_has_its_own_first_and_last_chunk(serve: Any) -> None:
    async with serve("One.", "Two.", "Three.") as world:
        chunks = await chunks_of(world, n=3, stream_options={"include_usage": True})
    *streamed, usage = chunks
    assert usage["choices"] == []
    for index in range(3):
        own = [c["choices"][0] for c in streamed if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert (own[-1]["delta"], own[-1]["finish_reason"]) == ({}, "stop")
        assert all(choice["finish_reason"] is None for choice in own[:-1])
        text = "".join(choice["delta"].get("content", "") for choice in own)
        assert text == ["One.", "Two.", "Three."][index]


async def test_a_chunk_tells_the_version_of_its_own_newest_token(serve: Any) -> None:
    async with serve("x" * 30) as world:
        world.engine.versions = ["fake@0", "fake@1"]
        chunks = await chunks_of(world, n=2)
        body = {"model": "fake", "messages": HI}
        async with httpx.AsyncClient(verify=False) as http:
            whole = await http.post(f"{world.url}/v1/chat/completions", json=body)
    for index in range(2):
        own = [c for c in chunks if c["choices"][0]["index"] == index]
        told = [chunk["system_fingerprint"] for chunk in own]
        # tokens 0 to 11 are of the first version
        assert told == ["fake@0"] * 5 + ["fake@1"] * (len(told) - 5)
        assert len({(c["id"], c["created"], c["model"]) for c in own}) == 1
    assert whole.json()["system_fingerprint"] == "fake@1"
    assert whole.headers["x-m1-weights-version"] == "fake@1"


@pytest.mark.parametrize("failure", ["stop", "raise"])
async def test_a_failure_inside_a_stream_is_an_error_event_and_the_end(
    serve: Any, failure: str
) -> None:
    async with serve("x" * 30) as world:
        if failure == "stop":
            world.engine.fails_after = 9
        else:
            world.engine.raises_after = EngineError("the engine broke"), 9
        blocks = await events(world)
    *chunks, last = parsed(blocks)
    assert set(last) == {"error"}
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "engine_error")
    assert "data: [DONE]" not in blocks
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "x" * 9


async def test_reasoning_goes_by_both_names_where_the_alias_says_so(serve: Any) -> None:
    aliases = {"both": {"reasoning_field": "both"}}
    async with serve(REPLY, model={"model_id": "fake", "aliases": aliases}) as world:
        chunks = await chunks_of(world, model="both", tools=TOOLS)
    thoughts = [
        chunk["choices"][0]["delta"]
        for chunk in chunks
        if "reasoning_content" in chunk["choices"][0]["delta"]
    ]
    assert "".join(delta["reasoning"] for delta in thoughts) == "hm, one"
    assert all(delta["reasoning"] == delta["reasoning_content"] for delta in thoughts)
