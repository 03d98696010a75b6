"""Section B of docs/public-bugs.md: what clients send back to us."""

import json
from typing import Any

import httpx
import openai
import pytest

USER: Any = {"role": "user", "content": "u"}


def called(arguments: str, **more: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **more}


def result(text: str = "found", call_id: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def last_prompt(world: Any) -> str:
    text: str = world.tok.decode(world.engine.requests[-1].prompt_ids)
    return text


@pytest.mark.parametrize("arguments", ['{"value": ', "{", "nothing of the kind", "[]", '"'])
async def test_broken_arguments_of_an_old_call_are_passed_on(
    serve: Any, ask: Any, tools: Any, arguments: str
) -> None:
    """B1, B2: vllm-project/vllm#43995, #48922; local-inference-lab/vllm#684;
    NVIDIA-NeMo/Gym#3474; ggml-org/llama.cpp#25510."""
    async with serve() as world:
        told = await ask(world, tools=tools, messages=[USER, called(arguments), result()])
        assert f'"arguments": {arguments}' in last_prompt(world)
    assert told.content == "Hello."


async def test_null_missing_and_empty_content_are_one(serve: Any, ask: Any, tools: Any) -> None:
    """B4, B5: lmstudio-ai/lmstudio-bug-tracker#261; cubist38/mlx-openai-server#205."""
    async with serve() as world:
        for old in (called("{}"), called("{}", content=None), called("{}", content="")):
            await ask(world, tools=tools, messages=[USER, old, result()])
        prompts = {request.prompt_ids for request in world.engine.requests}
        text = last_prompt(world)
    assert len(prompts) == 1
    assert text.index('{"name": "look", "arguments": {}}') < text.index("tool result: found")


async def test_an_empty_list_of_calls_is_none(serve: Any, ask: Any) -> None:
    """B7: vllm-project/vllm#12937, #13978."""
    async with serve() as world:
        for calls in ([], None):
            old = {"role": "assistant", "content": "a", "tool_calls": calls}
            await ask(world, messages=[USER, old, USER])
        prompts = {request.prompt_ids for request in world.engine.requests}
    assert len(prompts) == 1


async def test_an_empty_list_of_tools_is_none(serve: Any, ask: Any) -> None:
    """B8: vllm-project/vllm#39741; open-webui/open-webui#26655; ml-explore/mlx-lm#170."""
    async with serve() as world:
        await ask(world)
        await ask(world, tools=[])
        await ask(world, tools=[], tool_choice="auto")
        await ask(world, tools=[], tool_choice="none")
        prompts = {request.prompt_ids for request in world.engine.requests}
    assert len(prompts) == 1


async def test_no_messages_are_refused(serve: Any, ask: Any) -> None:
    """B10: letta-ai/letta#3381."""
    async with serve() as world:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(world, messages=[])
        assert (await ask(world)).content == "Hello."
    assert (caught.value.param, caught.value.type) == ("messages", "invalid_request_error")


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""]])
async def test_an_empty_prompt_is_refused_and_the_engine_lives_on(serve: Any, prompt: Any) -> None:
    """B11: vllm-project/vllm#7283, #7632, #7746."""
    async with serve() as world, httpx.AsyncClient(verify=False, base_url=world.url) as http:
        refused = await http.post("/v1/completions", json={"model": "fake", "prompt": prompt})
        answer = await http.post("/v1/completions", json={"model": "fake", "prompt": "a"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith("prompt")
    assert answer.status_code == 200


async def test_ids_of_calls_never_repeat(serve: Any, ask: Any, tools: Any, call_text: Any) -> None:
    """B13: fw-ai/fireconnect#16; NousResearch/hermes-agent#70724; NVIDIA-NeMo/Switchyard#502."""
    async with serve(call_text(("look", {}), ("look", {}))) as world:
        ids: list[str] = []
        messages: list[Any] = [USER]
        for turn in range(3):
            told = await ask(world, stream=turn % 2 == 1, tools=tools, messages=messages)
            ids += [call["id"] for call in told.calls]
            calls = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in told.calls
            ]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            messages += [result(f"r{turn}", call["id"]) for call in told.calls]
        assert "tool result: r1" in last_prompt(world)
    assert len(set(ids)) == len(ids) == 6


@pytest.mark.parametrize("is_replayed", [True, False])
async def test_the_next_turn_extends_the_sampled_tokens_with_and_without_replayed_reasoning(
    serve: Any, ask: Any, is_replayed: bool
) -> None:
    """B15: QwenLM/Qwen3.8#131; verl-project/verl#6854; nibor1896/Crow#60."""
    async with serve(
        "<think>\nhm\n</think>\nHi", model={"model_id": "fake", "history": "exact"}
    ) as world:
        await ask(world, messages=[USER])
        old: dict[str, Any] = {"role": "assistant", "content": "Hi"}
        if is_replayed:
            old["reasoning_content"] = "hm"
        await ask(world, messages=[USER, old, USER])
        first, second = world.turns
    assert tuple(second.prompt_ids[: len(first.prompt_ids)]) == tuple(first.prompt_ids)
    sampled = world.tok.encode_control("<think>\nhm\n</think>\nHi<end_of_sentence>")
    start = len(first.prompt_ids)
    assert list(second.prompt_ids[start : start + len(sampled)]) == sampled
    assert second.history_rule == "exact"


async def test_what_was_sampled_is_logged_whatever_the_prompt_becomes(serve: Any, ask: Any) -> None:
    """B15: under the published template the next prompt is no extension; each turn says which ids
    it was given and by which rule."""
    model = {"model_id": "fake", "history": "template"}
    async with serve("<think>\nhm\n</think>\nHi", model=model) as world:
        await ask(world, messages=[USER])
        await ask(world, messages=[USER, {"role": "assistant", "content": "Hi"}, USER])
        for request, turn in zip(world.engine.requests, world.turns, strict=True):
            assert tuple(turn.prompt_ids) == request.prompt_ids
            assert turn.history_rule == "template"
        assert "hm" not in last_prompt(world)


async def test_messages_of_any_odd_client_are_read(serve: Any, ask: Any, tools: Any) -> None:
    """B4's kind: fields that libraries add to the messages they send back."""
    odd = called(
        json.dumps({"x": 1}),
        refusal=None,
        function_call=None,
        audio=None,
        annotations=[],
        provider_specific_fields={"refusal": None},
        reasoning_content=None,
    )
    messages = [USER, odd, {**result(), "name": "look"}]
    async with serve() as world:
        assert (await ask(world, tools=tools, messages=messages)).finish == "stop"
