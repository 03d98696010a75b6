"""Section C of docs/public-bugs.md: parameters that killed engines, or answered something else."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

USER: Any = {"role": "user", "content": "u"}


async def post(world: Any, body: dict[str, Any] | bytes, path: str = "chat/completions") -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(verify=False) as http:
        return await http.post(f"{world.url}/v1/{path}", content=content)


async def test_a_prompt_is_scored_without_saying_anything(serve_local: Any) -> None:
    """C1: vllm-project/vllm#6521; C10: vllm-project/vllm#10234, vllm-project/vllm-metal#331,
    tenstorrent/vllm#343."""
    async with serve_local() as world:
        for _ in range(2):
            answer = await world.client.completions.create(
                model="fake", prompt="What is the status?", max_tokens=0, echo=True, logprobs=1
            )
            [choice] = answer.choices
            logprobs = choice.logprobs
            assert choice.text == "What is the status?"
            assert answer.usage.completion_tokens == 0
            assert answer.usage.prompt_tokens == len(logprobs.tokens)
            assert logprobs.token_logprobs[0] is None
            assert all(value < 0 for value in logprobs.token_logprobs[1:])
            assert len(logprobs.token_logprobs) == len(logprobs.text_offset)
            assert "".join(logprobs.tokens) == choice.text


async def test_echo_and_logprobs_are_as_long_as_the_tokens(serve_local: Any) -> None:
    """C10: and what was sampled follows, with as many top entries as asked for."""
    async with serve_local() as world:
        answer = await world.client.completions.create(
            model="fake", prompt="What is", max_tokens=3, echo=True, logprobs=2, temperature=0
        )
        [choice] = answer.choices
        logprobs = choice.logprobs
    assert choice.text.startswith("What is")
    sizes = {len(logprobs.tokens), len(logprobs.token_logprobs), len(logprobs.text_offset)}
    assert len(sizes) == 1
    assert all(len(top) >= 2 for top in logprobs.top_logprobs[-3:])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "C2 vllm-project/vllm#16529, #6866; sgl-project/sglang#7670": (
        {"logit_bias": {"999999": 5}},
        "logit_bias",
    ),
    "C2 negative": ({"logit_bias": {"-1": 5}}, "logit_bias"),
    "C3 vllm-project/vllm#54195": ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    "C3 negative": ({"stop_token_ids": [-1]}, "stop_token_ids"),
    "C7 ggml-org/llama.cpp#19367": ({"temperature": 999999}, "temperature"),
    "C7 negative": ({"temperature": -1}, "temperature"),
    "C7 top_p": ({"top_p": -1}, "top_p"),
    "C7 penalty": ({"presence_penalty": 1e9}, "presence_penalty"),
    "C7 repetition": ({"repetition_penalty": 0}, "repetition_penalty"),
    "C11 vllm-project/vllm#16836": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "C11 negative": ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_would_break_an_engine_never_reaches_it(serve_local: Any, name: str) -> None:
    field, param = REFUSED[name]
    async with serve_local() as world:
        for is_stream in (False, True):
            body = {"model": "fake", "messages": [USER], "stream": is_stream, "max_tokens": 3}
            refused = await post(world, {**body, **field})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == param
        assert (await post(world, body)).status_code == 200


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "frequency_penalty", "min_p"])
async def test_numbers_that_json_does_not_have_are_refused(
    serve: Any, field: str, value: str
) -> None:
    """C7: ggml-org/llama.cpp#19367."""
    body = (
        f'{{"model": "fake", "messages": [{{"role": "user", "content": "u"}}], "{field}": {value}}}'
    )
    async with serve() as world:
        refused = await post(world, body.encode())
        assert refused.status_code == 400
        assert not world.engine.requests


async def test_a_huge_n_is_refused_and_disturbs_nobody(serve: Any, ask: Any) -> None:
    """C6: vllm-project/vllm#37952, #6646."""
    async with serve("word " * 40) as world:
        world.engine.delay_s = 0.001
        streaming = asyncio.create_task(ask(world, stream=True))
        for n in (100_000, 2**31, 2**63, 10**30):
            body = {"model": "fake", "messages": [USER], "n": n}
            refused = await post(world, body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        assert (await streaming).content == "word " * 40
        assert len(world.engine.requests) == 1


async def test_logprobs_alone_have_empty_tops(serve: Any, ask: Any) -> None:
    """C9: vllm-project/vllm#4795."""
    async with serve("Hi é") as world:
        answer = await world.client.chat.completions.create(
            model="fake", messages=[USER], logprobs=True
        )
    entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries) == "Hi é".encode()
    assert all(entry.top_logprobs == [] and entry.logprob <= 0 for entry in entries)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_prompt_that_is_too_long_is_refused_at_once_in_openais_words(
    serve: Any, ask: Any, is_stream: bool
) -> None:
    """C14, C15: NVIDIA/TensorRT-LLM#19457; sgl-project/sglang#3642; vllm-project/vllm#1087."""
    async with serve() as world:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(world, stream=is_stream, messages=[{**USER, "content": "x" * 9000}])
        assert (await ask(world)).content == "Hello."
    assert caught.value.code == "context_length_exceeded"
    assert "This model's maximum context length is 4096 tokens" in caught.value.message


async def test_a_maximum_beyond_the_context_is_cut_to_it(serve: Any, ask: Any) -> None:
    """C14: as docs/api.md says."""
    async with serve() as world:
        assert (await ask(world, max_tokens=10**6)).content == "Hello."
        [request] = world.engine.requests
    # the engine stops where the context ends and says so
    assert request.limits.max_tokens == 4096


async def test_without_leave_to_call_nothing_is_a_call(
    serve: Any, ask: Any, tools: Any, call_text: Any
) -> None:
    """C17: ROCm/FastFlowLM#728."""
    text = call_text(("look", {}))
    async with serve(text) as world:
        for is_stream in (False, True):
            told = await ask(world, stream=is_stream, tools=tools, tool_choice="none")
            assert told.message == (text, "", [], "stop")
            told = await ask(world, stream=is_stream, tools=tools, tool_choice="none", max_tokens=5)
            assert (told.calls, told.finish) == ([], "length")
        assert "You are provided with these tools" not in world.tok.decode(
            world.engine.requests[0].prompt_ids
        )
