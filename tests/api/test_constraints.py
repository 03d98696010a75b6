"""Constrained answers through a real server and the real client: JSON, forced calls, refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pydantic
import pytest
import pytest_asyncio
import torch

import m1serve.model
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings
from m1serve.engine.local import LocalEngine
from m1serve.engine.script import ScriptedReply
from m1serve.engine.scripted import ScriptedEngine
from m1serve.model.checkpoint import load_model
from m1serve.model.weights import version_path, write_version
from m1serve.store.captured import capture
from m1serve.store.records import TurnRecord
from m1serve.types import TokenFlag, VersionRef

Serve = Callable[..., AbstractAsyncContextManager[Any]]

NANO = Path(m1serve.model.__file__).parent / "nano"
USER: list[Any] = [{"role": "user", "content": "What is the status of order 4217?"}]
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "order_id": {"type": "string", "pattern": "^[0-9]{4}$"},
        "status": {"enum": ["pending", "shipped", "cancelled"]},
        "total": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 500}, {"type": "null"}]},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "maxItems": 2},
    },
    "required": ["order_id", "status", "total"],
    "additionalProperties": False,
    "$defs": {
        "line": {
            "type": "object",
            "properties": {"is_gift": {"type": "boolean"}},
            "required": ["is_gift"],
            "additionalProperties": False,
        }
    },
}
JSON_ORDER: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "order", "strict": True, "schema": ORDER},
}
ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {"order_id": {"type": "string", "pattern": "^[0-9]{4}$"}},
    "required": ["order_id"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any = ARGUMENTS, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("get_order", strict=True), tool("cancel_order")]
NAMED: Any = {"type": "function", "function": {"name": "cancel_order"}}


def call(name: str, arguments: str) -> str:
    return f'<tool_calls>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_calls>'


def scripted(tok: ChatTokenizer, *texts: str) -> ScriptedEngine:
    """Says the texts as choices of one request."""
    reply = ScriptedReply(text=texts[0], more_texts=texts[1:])
    return ScriptedEngine(
        lambda request: reply, tokenizer=tok, settings=EngineSettings(kind="scripted")
    )


@pytest.fixture(scope="session")
def nano_version(tmp_path_factory: pytest.TempPathFactory) -> VersionRef:
    root = tmp_path_factory.mktemp("nano")
    write_version(
        root,
        weights_version="nano@0",
        model=load_model(NANO),
        tokenizer_file=NANO / "tokenizer.json",
        parent=None,
        run_id=None,
        golden_prompts=[list(range(10, 30))],
    )
    return VersionRef(weights_version="nano@0", path=str(version_path(root, "nano@0")))


@pytest_asyncio.fixture
async def nano(nano_version: VersionRef) -> AsyncIterator[LocalEngine]:
    torch.set_num_threads(1)
    tokenizer = ChatTokenizer.load(NANO)
    settings = EngineSettings(max_model_len=2048, num_slots=16)
    engine = LocalEngine.start(nano_version, settings=settings, tokenizer=tokenizer)
    yield engine
    await engine.close()


@pytest.fixture
def on_nano(serve: Serve, nano: LocalEngine) -> Callable[[], AbstractAsyncContextManager[Any]]:
    return lambda: serve(over=nano, tok=ChatTokenizer.load(NANO))


def num_trainable(turn: TurnRecord) -> int:
    """As the ledger counts it."""
    return capture("w", 0, turn, b"0" * 32).facts.num_trainable


async def ask(world: Any, **fields: Any) -> Any:
    fields.setdefault("messages", USER)
    return await world.client.chat.completions.create(model="fake", **fields)


async def streamed(world: Any, **fields: Any) -> Any:
    """The one choice of a stream, put together by the client's own helper."""
    fields.setdefault("messages", USER)
    async with world.client.chat.completions.stream(model="fake", **fields) as stream:
        async for _ in stream:
            pass
        return (await stream.get_final_completion()).choices[0]


# ---- JSON answers --------------------------------------------------------------------------------


async def test_answers_of_a_schema_validate_whatever_is_drawn(on_nano: Any) -> None:
    async with on_nano() as world:
        answers = await asyncio.gather(
            *(
                ask(world, response_format=JSON_ORDER, seed=seed, temperature=1.5, max_tokens=900)
                for seed in range(30)
            )
        )
        finished = [a.choices[0] for a in answers if a.choices[0].finish_reason == "stop"]
        assert len(finished) >= 25
        for choice in finished:
            jsonschema.validate(json.loads(choice.message.content), ORDER)
        assert len({choice.message.content for choice in finished}) > 10


async def test_a_json_object_is_any_object(on_nano: Any) -> None:
    async with on_nano() as world:
        answers = await asyncio.gather(
            *(
                ask(
                    world,
                    response_format={"type": "json_object"},
                    seed=seed,
                    max_tokens=600,
                    extra_body={"min_p": 0.05},
                )
                for seed in range(6)
            )
        )
        finished = [a.choices[0] for a in answers if a.choices[0].finish_reason == "stop"]
        assert finished
        assert all(isinstance(json.loads(c.message.content), dict) for c in finished)


async def test_thinking_is_free_then_comes_json_streamed_or_not(
    serve: Serve, tok: ChatTokenizer
) -> None:
    reply = '<think>\nIs it {"json": yet?\n</think>\n{"order_id": "4217", "status": "pending", '
    reply += '"total": null}'
    async with serve(over=scripted(tok, reply)) as world:
        whole = (await ask(world, response_format=JSON_ORDER)).choices[0]
        pieces = await streamed(world, response_format=JSON_ORDER)
        for choice in (whole, pieces):
            assert choice.message.reasoning_content == 'Is it {"json": yet?'
            assert json.loads(choice.message.content)["order_id"] == "4217"
            assert choice.finish_reason == "stop"


async def test_only_the_thought_of_a_constrained_turn_can_be_trained(
    serve: Serve, tok: ChatTokenizer
) -> None:
    thought = "<think>\nPending.\n</think>"
    reply = thought + '\n{"order_id": "4217", "status": "pending", "total": 35}'
    async with serve(over=scripted(tok, reply, "{}")) as world:
        await ask(world, response_format=JSON_ORDER)
        turn = world.turns[0]
        # the tag that opens the thought was drawn while the answer could have begun as well
        num_free = len(tok.encode_control(thought)) - 1
        flags = list(turn.token_flags)
        assert flags[1 : 1 + num_free] == [TokenFlag.SAMPLED.value] * num_free
        masked = (TokenFlag.SAMPLED | TokenFlag.MASKED).value
        assert flags[:1] + flags[1 + num_free :] == [masked] * (len(flags) - num_free)
        assert num_trainable(turn) == num_free
        await ask(world, response_format={"type": "text"})
        assert num_trainable(world.turns[1]) == len(world.turns[1].completion_ids)


async def test_length_wins_over_an_unfinished_object(on_nano: Any) -> None:
    async with on_nano() as world:
        answer = await ask(world, response_format=JSON_ORDER, max_tokens=3, seed=1)
        assert answer.choices[0].finish_reason == "length"


async def test_a_scripted_reply_that_breaks_the_grammar_is_an_error(
    serve: Serve, tok: ChatTokenizer
) -> None:
    async with serve(over=scripted(tok, "It is pending.")) as world:
        with pytest.raises(openai.APIError):
            await ask(world, response_format=JSON_ORDER)
        assert (await ask(world)).choices[0].message.content == "It is pending."


class Line(pydantic.BaseModel):
    sku: Literal["a", "b"]
    count: int | None


class Order(pydantic.BaseModel):
    """Nested models, unions and literals, as the client's own helper turns them into a schema."""

    lines: Annotated[list[Line], pydantic.Field(max_length=2)]
    kind: Literal["order", "return"]
    before: Line | None = None


async def test_the_clients_own_models_are_filled(on_nano: Any) -> None:
    async with on_nano() as world:
        answers = await asyncio.gather(
            *(
                world.client.chat.completions.parse(
                    model="fake", messages=USER, response_format=Order, seed=seed, max_tokens=500
                )
                for seed in range(4)
            ),
            return_exceptions=True,
        )
        cut = [a for a in answers if isinstance(a, openai.LengthFinishReasonError)]
        filled = [a.choices[0].message.parsed for a in answers if a not in cut]
        assert all(isinstance(order, Order) for order in filled)
        assert len(filled) >= 2


async def test_the_clients_own_tools_are_filled(on_nano: Any) -> None:
    tools = [openai.pydantic_function_tool(Line)]
    async with on_nano() as world:
        answer = await world.client.chat.completions.parse(
            model="fake", messages=USER, tools=tools, tool_choice="required", seed=1, max_tokens=900
        )
        calls = answer.choices[0].message.tool_calls
        assert calls
        assert all(isinstance(made.function.parsed_arguments, Line) for made in calls)


# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_forced_calls_parse_and_fit_their_schema(on_nano: Any, choice: Any) -> None:
    async with on_nano() as world:
        answers = await asyncio.gather(
            *(
                ask(world, tools=TOOLS, tool_choice=choice, seed=seed, max_tokens=900)
                for seed in range(8)
            )
        )
        num_called = 0
        for answer in answers:
            message, reason = answer.choices[0].message, answer.choices[0].finish_reason
            if reason == "length":
                continue
            assert reason == "tool_calls"
            assert not message.content
            for made in message.tool_calls:
                jsonschema.validate(json.loads(made.function.arguments), ARGUMENTS)
                if choice is NAMED:
                    assert made.function.name == "cancel_order"
            num_called += 1
        assert num_called >= 6


async def test_a_forced_call_streams_as_it_is_answered(on_nano: Any) -> None:
    async with on_nano() as world:
        asked = {"tools": TOOLS[:1], "tool_choice": "required", "seed": 3, "max_tokens": 900}
        whole = (await ask(world, **asked)).choices[0]
        pieces = await streamed(world, **asked)
        assert pieces.finish_reason == whole.finish_reason == "tool_calls"
        assert [c.function.arguments for c in pieces.message.tool_calls] == [
            c.function.arguments for c in whole.message.tool_calls
        ]


async def test_one_call_at_most_leaves_free_text_free(serve: Serve, tok: ChatTokenizer) -> None:
    text = "I look it up.\n" + call("get_order", '{"order_id": "4217"}')
    async with serve(over=scripted(tok, text)) as world:
        answer = await ask(world, tools=TOOLS, parallel_tool_calls=False)
        assert len(answer.choices[0].message.tool_calls) == 1
        turn = world.turns[0]
        num_free = len(tok.encode_control("I look it up.\n<tool_calls>"))
        assert num_trainable(turn) == num_free
        assert set(turn.token_flags[num_free:]) == {5}
        assert set(turn.token_flags[:num_free]) == {1}


async def test_a_second_call_is_no_reply_to_one_at_most(serve: Serve, tok: ChatTokenizer) -> None:
    line = '{"name": "get_order", "arguments": {"order_id": "4217"}}'
    text = f"<tool_calls>\n{line}\n{line}\n</tool_calls>"
    async with serve(over=scripted(tok, text)) as world:
        answer = await ask(world, tools=TOOLS)
        assert len(answer.choices[0].message.tool_calls) == 2
        with pytest.raises(openai.APIError):
            await ask(world, tools=TOOLS, parallel_tool_calls=False)


async def test_strict_tools_bind_their_arguments_and_others_do_not(
    serve: Serve, tok: ChatTokenizer
) -> None:
    async with serve(over=scripted(tok, call("cancel_order", '{"why": 1}'))) as world:
        answer = await ask(world, tools=TOOLS)
        assert answer.choices[0].message.tool_calls[0].function.arguments == '{"why": 1}'
    async with serve(over=scripted(tok, call("get_order", '{"why": 1}'))) as world:
        with pytest.raises(openai.APIError):
            await ask(world, tools=TOOLS)


async def test_plain_tools_are_not_constrained(serve: Serve, tok: ChatTokenizer) -> None:
    async with serve(over=scripted(tok, call("get_order", "{}"))) as world:
        await ask(world, tools=[tool("get_order")], tool_choice="auto")
        assert set(world.turns[0].token_flags) == {1}


async def test_json_may_be_put_off_by_a_call(serve: Serve, tok: ChatTokenizer) -> None:
    reply = call("get_order", '{"order_id": "4217"}')
    async with serve(over=scripted(tok, reply)) as world:
        answer = await ask(world, tools=TOOLS, response_format=JSON_ORDER)
        assert answer.choices[0].finish_reason == "tool_calls"
    async with serve(over=scripted(tok, "No order, sorry.")) as world:
        with pytest.raises(openai.APIError):
            await ask(world, tools=TOOLS, response_format=JSON_ORDER)


async def test_a_forced_call_of_a_schema_nobody_can_keep_is_any_object(
    serve: Serve, tok: ChatTokenizer
) -> None:
    for odd in ({"type": "object", "not": {}}, {"type": "object", "oneOf": [ORDER, ARGUMENTS]}):
        async with serve(over=scripted(tok, call("f", '{"x": 1}'))) as world:
            answer = await ask(world, tools=[tool("f", odd)], tool_choice="required")
            assert answer.choices[0].message.tool_calls[0].function.arguments == '{"x": 1}'
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(world, tools=[tool("f", odd, strict=True)], tool_choice="required")
            assert caught.value.param.startswith("tools[0].function.parameters")


async def test_any_spelling_of_a_scripted_call_keeps_its_grammar(serve: Serve) -> None:
    nano = ChatTokenizer.load(NANO)
    text = "<think>\nLet me.\n</think>\n" + call("cancel_order", '{"order_id":"4217"}')
    async with serve(over=scripted(nano, text), tok=nano) as world:
        answer = await ask(world, tools=TOOLS, tool_choice=NAMED)
        assert answer.choices[0].message.tool_calls[0].function.name == "cancel_order"
        assert answer.choices[0].message.reasoning_content == "Let me."


# ---- refusals ------------------------------------------------------------------------------------


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def with_schema(schema: Any) -> dict[str, Any]:
    wrapped = {"name": "s", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": wrapped}}


SCHEMA = "response_format.json_schema.schema"
CHAIN = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(5000)}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "required without tools": ({"tool_choice": "required"}, "tool_choice"),
    "named without tools": ({"tool_choice": NAMED, "tools": []}, "tool_choice"),
    "named of another": ({"tool_choice": NAMED, "tools": TOOLS[:1]}, "tool_choice"),
    "an unknown choice": ({"tool_choice": "maybe", "tools": TOOLS}, "tool_choice"),
    "a choice without a name": ({"tool_choice": {"type": "function"}, "tools": TOOLS},) * 1
    + ("tool_choice",),
    "json and a forced call": (
        {"tool_choice": "required", "tools": TOOLS, "response_format": {"type": "json_object"}},
        "response_format",
    ),
    "an unknown format": ({"response_format": {"type": "xml"}}, "response_format.type"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    "a schema in a list": (with_schema([ORDER]), SCHEMA),
    "a keyword that cannot be kept": (
        with_schema({"type": "object", "properties": {"a": {"not": {}}}}),
        f"{SCHEMA}.properties.a.not",
    ),
    "our own options": (with_schema({"x-guidance": {"lenient": True}}), f"{SCHEMA}.x-guidance"),
    "an unknown type": (with_schema({"type": "objet"}), SCHEMA),
    "a schema elsewhere": (with_schema({"$ref": "https://x/y"}), f"{SCHEMA}.$ref"),
    "a schema that is not there": (with_schema({"$ref": "#/$defs/a"}), f"{SCHEMA}.$ref"),
    "a circle": (with_schema({"$ref": "#"}), SCHEMA),
    "a list without an end": (
        with_schema(
            {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
        ),
        SCHEMA,
    ),
    "nested 100 deep": (with_schema(nested(100)), SCHEMA),
    "a million bytes": (with_schema({"enum": ["x" * 1_000_000]}), SCHEMA),
    "a chain of 5000 references": (with_schema({"$ref": "#/$defs/d0", "$defs": CHAIN}), SCHEMA),
    "divisible by a prime": (with_schema({"multipleOf": 99999989}), f"{SCHEMA}.multipleOf"),
    "a lookahead": (with_schema({"type": "string", "pattern": "(?=a)b"}), SCHEMA),
    "an open group": (with_schema({"type": "string", "pattern": "(["}), SCHEMA),
    "an endless pattern": (with_schema({"pattern": "a" * 5000}), f"{SCHEMA}.pattern"),
    "a count below nothing": (with_schema({"minItems": -1}), f"{SCHEMA}.minItems"),
    "numbers nobody has": (with_schema({"minimum": 10**400}), SCHEMA),
    "strict arguments of no object": (
        {"tools": [tool("f", {"type": "array"}, strict=True)]},
        "tools[0].function.parameters",
    ),
    "strict arguments that contradict themselves": (
        {"tools": [*TOOLS, tool("f", {"type": "object", "enum": []}, strict=True)]},
        "tools[2].function.parameters",
    ),
}


@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED)
async def test_what_cannot_be_kept_is_refused_by_name(
    serve: Serve, tok: ChatTokenizer, fields: dict[str, Any], param: str
) -> None:
    async with serve(over=scripted(tok, "{}")) as world:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(world, **fields)
        assert caught.value.param == param
        # it lives on
        assert (await ask(world)).choices[0].message.content == "{}"


async def test_ten_thousand_levels_are_no_valid_body(serve: Serve, tok: ChatTokenizer) -> None:
    deep = '{"items":' * 10_000 + "{}" + "}" * 10_000
    body = (
        '{"model": "fake", "messages": [{"role": "user", "content": "x"}], "response_format": '
        f'{{"type": "json_schema", "json_schema": {{"name": "s", "schema": {deep}}}}}}}'
    )
    async with serve(over=scripted(tok, "{}")) as world:
        answer = await world.client._client.post(
            f"{world.url}/v1/chat/completions",
            content=body,
            headers={"content-type": "application/json", "authorization": "Bearer any"},
        )
        assert answer.status_code == 400
        assert (await ask(world)).choices[0].message.content == "{}"


@pytest.mark.parametrize(
    "pattern",
    [
        "^(a+)+$",
        "^(([a-z])+.)+[A-Z]([a-z])+$",
        "^((((a{1,100}){1,100}){1,100}){1,100})$",
        "^(.*(a|b).{400}.*c.{300})$",
        r"^(\p{L}{1,50}.*\w{3,30}\W+){5,90}$",
    ],
)
async def test_hostile_patterns_end_in_an_answer_or_an_error(
    on_nano: Any, nano: LocalEngine, pattern: str
) -> None:
    async with on_nano() as world:
        schema = {"type": "string", "pattern": pattern}
        beside = asyncio.create_task(ask(world, max_tokens=40, seed=1))
        try:
            answer = await ask(world, **with_schema(schema), max_tokens=120, seed=2)
            ended = answer.choices[0].finish_reason
        except openai.APIError as error:
            ended = "error" if "grammar" in str(error) else str(error)
        assert ended in ("stop", "length", "error")
        assert (await beside).choices[0].message.content
        assert nano.stats().num_running == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS[1:], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": TOOLS}, "tools"),
    ],
)
async def test_an_engine_that_cannot_constrain_says_so(
    serve: Serve, fields: dict[str, Any], param: str
) -> None:
    async with serve("Hello.") as world:
        with pytest.raises(openai.BadRequestError, match="does not constrain") as caught:
            await ask(world, **fields)
        assert caught.value.param == param
        assert (await ask(world, tools=TOOLS[1:], parallel_tool_calls=True)).choices
