"""Section A of docs/public-bugs.md: reasoning and tool calls, over HTTP, in both modes."""

import json
from typing import Any

import pytest

from m1serve.config import EngineSettings
from m1serve.engine.script import ScriptedReply
from m1serve.engine.scripted import ScriptedEngine

STEPS = (1, 2, 5, 1000)


async def both(ask: Any, world: Any, **more: Any) -> Any:
    """The answer, which is the same in both modes and for every size of the engine's deltas."""
    whole = await ask(world, **more)
    for step in STEPS:
        world.engine.step = step
        assert (await ask(world, stream=True, **more)).message == whole.message
    return whole


async def test_calls_are_parsed_behind_reasoning_in_both_modes(
    serve: Any, ask: Any, tools: Any, call_text: Any
) -> None:
    """A1, A2: waybarrios/vllm-mlx#163, #148, #168."""
    async with serve("<think>\na\n</think>\n" + call_text(("look", {"x": 1}))) as world:
        told = await both(ask, world, tools=tools)
    assert told.message == ("", "a", [("look", '{"x": 1}')], "tool_calls")
    assert told.content is None


async def test_calls_without_a_think_block_are_parsed(
    serve: Any, ask: Any, tools: Any, call_text: Any
) -> None:
    """A3: tenstorrent/vllm#480."""
    async with serve(call_text(("look", {}))) as world:
        told = await both(ask, world, tools=tools)
    assert told.message == ("", "", [("look", "{}")], "tool_calls")


async def test_a_history_does_not_decide_where_reasoning_ends(
    serve: Any, ask: Any, tools: Any
) -> None:
    """A4: vllm-project/vllm#39885."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "u"},
        {
            "role": "assistant",
            "content": "</think>",
            "reasoning_content": "<think>",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "c", "content": "<think>found</think>"},
    ]
    async with serve("<think>\nhm\n</think>\nanswer") as world:
        told = await both(ask, world, tools=tools, messages=messages)
    assert told.message == ("answer", "hm", [], "stop")


async def test_arguments_arrive_while_they_are_written(
    serve: Any, ask: Any, tools: Any, call_text: Any
) -> None:
    """A6: vllm-project/vllm#39649, #40779."""
    async with serve(call_text(("look", {"x": "word " * 400}))) as world:
        world.engine.step = 10
        told = await ask(world, stream=True, tools=tools)
    pieces = [
        call.function.arguments
        for delta in told.deltas
        for call in delta.tool_calls or []
        if call.function.arguments
    ]
    assert len(pieces) > 150
    assert max(map(len, pieces)) <= 2 * world.engine.step


TRICKY = {
    "A7 sgl-project/sglang#23071": 'a "quoted" | piped \\ ' * 60,
    "A10 vllm-project/vllm#10589": 'é\n\t"\\\u2028日本語🙂\x7f',
    "A11 vllm-project/vllm#45167": "</tool_calls> <tool_calls> </think> <think>",
    "A12 ollama/ollama#12017, #16937": '"}A',
    "A12 brackets": "}}]]{[",
    "a line that looks like a call": '\n{"name": "look", "arguments": {}}\n',
}


@pytest.mark.parametrize("is_ascii", [True, False])
@pytest.mark.parametrize("name", TRICKY)
async def test_no_string_breaks_a_call(
    serve: Any, ask: Any, tools: Any, name: str, is_ascii: bool
) -> None:
    arguments = json.dumps({"x": TRICKY[name], "y": [TRICKY[name]]}, ensure_ascii=is_ascii)
    text = f'<tool_calls>\n{{"name": "look", "arguments": {arguments}}}\n</tool_calls>'
    async with serve(text) as world:
        told = await both(ask, world, tools=tools)
    assert told.message == ("", "", [("look", arguments)], "tool_calls")


async def test_parallel_calls_keep_apart(serve: Any, ask: Any, tools: Any, call_text: Any) -> None:
    """A8: vllm-project/vllm#20297."""
    text = call_text(("look", {"x": 1}), ("say", {"y": "b"}), ("look", {"x": 1}))
    async with serve(text) as world:
        told = await both(ask, world, tools=tools)
        streamed = await ask(world, stream=True, tools=tools)
    assert told.message[2] == [("look", '{"x": 1}'), ("say", '{"y": "b"}'), ("look", '{"x": 1}')]
    assert len({call["id"] for call in [*told.calls, *streamed.calls]}) == 6


async def test_a_call_cut_by_length_is_reported_as_cut(
    serve: Any, ask: Any, tools: Any, call_text: Any
) -> None:
    """A16: vllm-project/vllm#58228, #46303; ai-dynamo/dynamo#13791."""
    async with serve(call_text(("look", {"x": "abc"}))) as world:
        num_tokens = (await ask(world, tools=tools)).usage.completion_tokens
        for max_tokens in range(1, num_tokens, 4):
            whole = await ask(world, tools=tools, max_tokens=max_tokens)
            streamed = await ask(world, stream=True, tools=tools, max_tokens=max_tokens)
            assert whole.message == streamed.message
            assert whole.finish == "length"


@pytest.mark.parametrize("arguments", ['{"x": "ab', '{"x": }', '{"x": 1', '{"x": NaN}', '{"x": 1]'])
async def test_a_call_that_nobody_can_read_is_not_reported_as_one_to_carry_out(
    serve: Any, ask: Any, tools: Any, arguments: str
) -> None:
    """A16's kind: the model ends, or a stop string cuts, inside a call."""
    text = f'<tool_calls>\n{{"name": "look", "arguments": {arguments}'
    async with serve(text + "}\n</tool_calls>") as world:
        told = await both(ask, world, tools=tools)
    assert told.finish == "stop"
    assert told.message[2][0][1].startswith(arguments)


async def test_a_name_that_is_no_text_is_no_error(serve: Any, ask: Any, tools: Any) -> None:
    """A10's kind: an escaped lone surrogate is legal JSON that cannot be sent on."""
    text = '<tool_calls>\n{"name": "\\ud800", "arguments": {"a": "\\ud800"}}\n</tool_calls>'
    async with serve(text) as world:
        told = await both(ask, world, tools=tools)
    assert told.message == ('{"name": "\\ud800", "arguments": {"a": "\\ud800"}}', "", [], "stop")


async def test_no_token_of_reasoning_is_lost_when_many_come_at_once(serve: Any, ask: Any) -> None:
    """A19: vllm-project/vllm#41691."""
    async with serve("<think>\nabcdefghij\n</think>\nklm") as world:
        for step in range(1, 20):
            world.engine.step = step
            told = await ask(world, stream=True)
            assert told.message == ("klm", "abcdefghij", [], "stop")


async def test_reasoning_has_its_field_and_is_read_back_under_both_names(
    serve: Any, ask: Any
) -> None:
    """A20: vllm-project/vllm#50624, #27752, #33402; danny-avila/LibreChat#12775, #13844."""
    async with serve("<think>\nhm\n</think>\nHi") as world:
        told = await both(ask, world)
        for name in ("reasoning_content", "reasoning"):
            old = {"role": "assistant", "content": "Hi", name: "hm"}
            messages = [
                {"role": "user", "content": "a"},
                old,
                {"role": "user", "content": "b"},
            ]
            await ask(world, messages=messages)
        prompts = [request.prompt_ids for request in world.engine.requests[-2:]]
    assert told.message == ("Hi", "hm", [], "stop")
    assert prompts[0] == prompts[1]


NAMED: Any = {"type": "function", "function": {"name": "look"}}
SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}


def scripted(tok: Any, text: str) -> ScriptedEngine:
    return ScriptedEngine(
        lambda request: ScriptedReply(text=text),
        tokenizer=tok,
        settings=EngineSettings(kind="scripted"),
    )


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_forced_call_is_made_behind_free_thinking(
    serve: Any, ask: Any, tok: Any, tools: Any, call_text: Any, choice: Any, is_stream: bool
) -> None:
    """A13: ai-dynamo/dynamo#11554. A15: vllm-project/vllm#25054, #9209, #49496."""
    thought = '<think>\n{"name": "look"}?\n</think>\n'
    async with serve(over=scripted(tok, thought + call_text(("look", {})))) as world:
        told = await ask(world, stream=is_stream, tools=tools, tool_choice=choice)
    assert told.message == ("", '{"name": "look"}?', [("look", "{}")], "tool_calls")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_schema_binds_what_follows_the_thinking(
    serve: Any, ask: Any, tok: Any, is_stream: bool
) -> None:
    """A17: ddalcu/mlx-serve#331; vllm-project/vllm#44012, #50948; ggml-org/llama.cpp#12276."""
    reply = '<think>\nIs it {"x": "no number"}?\n</think>\n{"x": 7}'
    async with serve(over=scripted(tok, reply)) as world:
        told = await ask(world, stream=is_stream, response_format=SCHEMA)
    assert told.message == ('{"x": 7}', 'Is it {"x": "no number"}?', [], "stop")
