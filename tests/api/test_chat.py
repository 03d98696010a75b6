"""Whole answers and streams through the real client."""

import json
from typing import Any

import pytest

from m1serve.types import StopCause

CALL = '<tool_calls>\n{"name": "look", "arguments": {"x": "a</tool_calls>b"}}\n</tool_calls>'
TWO_CALLS = (
    "<think>\nhm\n</think>\nLet me see.\n<tool_calls>\n"
    '{"name": "look", "arguments": {"x": 1}}\n{"name": "say", "arguments": {}}\n</tool_calls>'
)
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
HI: Any = [{"role": "user", "content": "Hi"}]


async def ask(world: Any, **more: Any) -> Any:
    return await world.client.chat.completions.create(model="fake", messages=HI, **more)


async def stream(world: Any, **more: Any) -> list[Any]:
    chunks = await world.client.chat.completions.create(
        model="fake", messages=HI, stream=True, **more
    )
    return [chunk async for chunk in chunks]


def fold(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    folded: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            into = folded.setdefault(
                choice.index,
                {"content": "", "reasoning": "", "calls": [], "finish": None, "logprobs": []},
            )
            delta = choice.delta
            into["content"] += delta.content or ""
            into["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(into["calls"])
                    into["calls"].append([call.function.name, ""])
                into["calls"][call.index][1] += call.function.arguments
            into["finish"] = choice.finish_reason or into["finish"]
            if choice.logprobs is not None:
                into["logprobs"] += choice.logprobs.content
    return folded


async def test_an_answer_has_openais_shape(serve: Any) -> None:
    async with serve("<think>\nhm\n</think>\nHello.") as world:
        answer = await ask(world)
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    assert answer.system_fingerprint == "fake@0"
    assert (choice.message.content, choice.finish_reason) == ("Hello.", "stop")
    assert choice.message.reasoning_content == "hm"
    assert choice.message.tool_calls is None
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details.reasoning_tokens == len("\nhm\n") + 2
    assert usage.prompt_tokens_details.cached_tokens == 2


async def test_calls_and_reasoning_arrive_together(serve: Any) -> None:
    async with serve("<think>\nhm\n</think>\n" + CALL) as world:
        choice = (await ask(world, tools=TOOLS)).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.reasoning_content == "hm"
    [call] = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"x": "a</tool_calls>b"}
    assert call.id.startswith("call_")


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
@pytest.mark.parametrize("text", ["Hällo 🙂.", TWO_CALLS, CALL, "<think>\nnever ends", ""])
async def test_a_stream_says_what_the_whole_answer_says(serve: Any, text: str, step: int) -> None:
    async with serve(text) as world:
        world.engine.step = step
        whole = (await ask(world, tools=TOOLS, logprobs=True)).choices[0]
        streamed = fold(await stream(world, tools=TOOLS, logprobs=True))[0]
    message = whole.message
    assert streamed["content"] == (message.content or "")
    assert streamed["reasoning"] == (getattr(message, "reasoning_content", None) or "")
    assert streamed["calls"] == [
        [call.function.name, call.function.arguments] for call in message.tool_calls or []
    ]
    assert streamed["finish"] == whole.finish_reason
    assert streamed["logprobs"] == whole.logprobs.content


async def test_a_stream_has_openais_order(serve: Any) -> None:
    async with serve(TWO_CALLS) as world:
        chunks = await stream(world, tools=TOOLS, stream_options={"include_usage": True})
    kinds = []
    for chunk in chunks[1:]:
        if not chunk.choices:
            kinds.append("usage")
            continue
        choice = chunk.choices[0]
        sent = {
            **choice.delta.model_dump(exclude_none=True, exclude_unset=True),
            "finish": choice.finish_reason,
        }
        kinds.append(next((k for k in sent if sent[k] is not None), "nothing"))
    order = [kind for n, kind in enumerate(kinds) if n == 0 or kinds[n - 1] != kind]
    assert order == ["reasoning_content", "content", "tool_calls", "finish", "usage"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_without_asking_there_is_no_usage_chunk(serve: Any) -> None:
    async with serve() as world:
        chunks = await stream(world)
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


async def test_a_call_is_named_once_and_then_only_indexed(serve: Any) -> None:
    async with serve(TWO_CALLS) as world:
        world.engine.step = 1
        chunks = await stream(world, tools=TOOLS)
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    named = [call for call in calls if call.id is not None]
    assert [(call.index, call.function.name, call.function.arguments) for call in named] == [
        (0, "look", ""),
        (1, "say", ""),
    ]
    assert len({call.id for call in named}) == 2
    assert all(c.function.name is None and c.type is None for c in calls if c.id is None)
    assert len(calls) > 6


async def test_length_wins_over_tool_calls(serve: Any) -> None:
    async with serve(CALL) as world:
        whole = (await ask(world, tools=TOOLS, max_tokens=40)).choices[0]
        streamed = fold(await stream(world, tools=TOOLS, max_completion_tokens=40))[0]
    assert whole.finish_reason == streamed["finish"] == "length"
    assert whole.message.tool_calls[0].function.arguments == streamed["calls"][0][1]


async def test_without_tools_or_with_none_markup_is_content(serve: Any) -> None:
    async with serve(CALL) as world:
        for more in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
            choice = (await ask(world, **more)).choices[0]
            assert choice.message.tool_calls is None
            assert choice.message.content == CALL
            assert choice.finish_reason == "stop"
        prompts = {request.prompt_ids for request in world.engine.requests}
    assert len(prompts) == 1


async def test_a_stop_string_is_trimmed_in_both_modes(serve: Any) -> None:
    async with serve("the brown fox") as world:
        whole = (await ask(world, stop="own fo")).choices[0]
        streamed = fold(await stream(world, stop=["own fo", "zzz"]))[0]
        assert world.engine.requests[0].stop_strings == ("own fo",)
    assert whole.message.content == streamed["content"] == "the br"


async def test_every_choice_is_whole(serve: Any) -> None:
    async with serve("one", "two", "three", "one", "two", "three", "x") as world:
        whole = await ask(world, n=3)
        streamed = fold(await stream(world, n=3))
    assert [c.message.content for c in whole.choices] == ["one", "two", "three"]
    assert [streamed[n]["content"] for n in range(3)] == ["one", "two", "three"]
    assert [streamed[n]["finish"] for n in range(3)] == ["stop"] * 3
    assert whole.usage.completion_tokens == len("onetwothree") + 3


async def test_logprobs_have_openais_form_and_skip_the_end_token(serve: Any) -> None:
    async with serve("Hi é") as world:
        answer = (await ask(world, logprobs=True, top_logprobs=2)).choices[0]
        plain = (await ask(world, logprobs=True)).choices[0]
    content = answer.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == "Hi é"
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(content)
    assert content[0].logprob == pytest.approx(-0.001)
    assert [entry.top_logprobs for entry in plain.logprobs.content] == [[]] * len(content)


async def test_token_ids_are_returned_when_asked_for(serve: Any) -> None:
    async with serve("Hello.") as world:
        answer = await ask(world, extra_body={"return_token_ids": True})
        chunks = await stream(world, extra_body={"return_token_ids": True})
        request = world.engine.requests[0]
    expected = world.tok.encode_control("Hello.<end_of_sentence>")
    assert answer.prompt_token_ids == list(request.prompt_ids)
    assert answer.choices[0].token_ids == expected
    assert chunks[0].prompt_token_ids == list(request.prompt_ids)
    streamed = [token_id for chunk in chunks for token_id in chunk.choices[0].token_ids]
    assert streamed == expected


async def test_streams_ask_for_small_deltas_and_bodies_for_one(serve: Any) -> None:
    async with serve() as world:
        await ask(world)
        await stream(world)
        whole, streamed = world.engine.requests
    assert whole.min_delta_interval_s == float("inf")
    assert streamed.min_delta_interval_s == 0.02


async def test_sampling_and_limits_reach_the_engine(serve: Any) -> None:
    async with serve() as world:
        await ask(
            world,
            temperature=0.5,
            top_p=0.9,
            seed=7,
            presence_penalty=1,
            logit_bias={"5": -3},
            max_tokens=9,
            extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1},
        )
        await ask(world)
        asked, default = world.engine.requests
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 7)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (3, 0.1, 1.1)
    assert sampling.presence_penalty == 1
    assert sampling.logit_bias == ((5, -3.0),)
    assert asked.limits.max_tokens == 9
    assert default.limits.max_tokens == 4096
    assert default.sampling.is_trainable


async def test_the_system_prefix_is_worth_a_snapshot(serve: Any) -> None:
    async with serve() as world:
        await world.client.chat.completions.create(
            model="fake", messages=[{"role": "system", "content": "S"}, *HI]
        )
        [request] = world.engine.requests
    [place] = request.snapshot_at
    assert world.tok.decode(request.prompt_ids[place:]).startswith("<beginning_of_sentence>user")


async def test_odd_histories_are_accepted(serve: Any) -> None:
    history: Any = [
        {"role": "developer", "content": [{"type": "text", "text": "S"}]},
        {"role": "assistant", "content": "Hi! How can I help?"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "function_call": None,
            "provider_specific_fields": {},
            "reasoning_content": "old",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "name": "extra",
                    "function": {"name": "look", "arguments": '{"x": '},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": None},
    ]
    async with serve() as world:
        await world.client.chat.completions.create(model="fake", messages=history)
        text = world.tok.decode(world.engine.requests[0].prompt_ids)
    assert '{"name": "look", "arguments": {"x": }\n' in text
    assert "tool name: look\ntool result: found\n" in text
    assert "user name=user\na\nb<end" in text
    assert "old" not in text


async def test_a_turn_cut_by_the_client_is_recorded_as_it_was(serve: Any) -> None:
    async with serve("Hello") as world:
        await ask(world, max_tokens=3)
        [turn] = world.turns
    assert turn.stop is StopCause.LENGTH
    assert turn.finish_reason == "length"
