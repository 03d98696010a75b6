"""Repetition early stop and thinking budget, as clients ask for them and see them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from m1serve.api.defaults import answer_defaults
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings, ModelSettings, load_settings
from m1serve.engine.script import ScriptedReply
from m1serve.engine.scripted import ScriptedEngine
from m1serve.errors import ConfigError
from m1serve.types import Limits, RepetitionStop, StopCause

HI: Any = [{"role": "user", "content": "Hi"}]
SCOPED = """
[model]
model_id = "fake"
repetition_stop_tokens = 200

[model.aliases.free]
repetition_stop_tokens = 0

[model.aliases.strict]
repetition_stop_probability = 0.5
reasoning_budget = 4
"""


def says(
    tok: ChatTokenizer, *texts: str, see: Callable[[Limits], None] | None = None
) -> ScriptedEngine:
    """A token after itself has p = 0.999 there; `see` gets each request's limits."""
    reply = ScriptedReply(text=texts[0], more_texts=texts[1:])

    def replies(request: Any) -> ScriptedReply:
        if see is not None:
            see(request.limits)
        return reply

    settings = EngineSettings(kind="scripted", max_model_len=8192)
    return ScriptedEngine(replies, tokenizer=tok, settings=settings)


async def ask(world: Any, *, is_stream: bool = False, **fields: Any) -> dict[str, Any]:
    """The first choice as an openai client has it, in either mode."""
    fields = {"model": "fake", "messages": HI, **fields}
    if not is_stream:
        answer = await world.client.chat.completions.create(**fields)
        choice, usage = answer.choices[0], answer.usage
        content, reasoning = choice.message.content, choice.message.model_extra
        thought = (reasoning or {}).get("reasoning_content")
    else:
        stream = await world.client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == 0]
        choice, usage = own[-1], chunks[-1].usage
        assert all("stop_cause" not in (c.model_extra or {}) for c in own[:-1])
        content = "".join(c.delta.content or "" for c in own)
        thought = "".join(getattr(c.delta, "reasoning_content", None) or "" for c in own) or None
    return {
        "finish": choice.finish_reason,
        "cause": choice.stop_cause,
        "content": content,
        "thought": thought,
        "tokens": usage.completion_tokens,
        "reasoning": usage.completion_tokens_details.reasoning_tokens,
    }


# ---- settings ------------------------------------------------------------------------------------


def model_of(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSettings:
    file = tmp_path / "m1serve.toml"
    file.write_text(text)
    monkeypatch.setenv("M1SERVE_CONFIG", str(file))
    return load_settings(file).model


async def test_a_request_goes_before_its_alias_and_that_before_the_model(
    serve: Any, tok: ChatTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(SCOPED, tmp_path, monkeypatch)
    seen: list[Limits] = []
    asked: list[tuple[dict[str, Any], RepetitionStop | None, int | None]] = [
        ({"model": "fake"}, RepetitionStop(num_tokens=200, probability=0.99), None),
        ({"model": "free"}, None, None),
        ({"model": "strict"}, RepetitionStop(num_tokens=200, probability=0.5), 4),
        (
            {"model": "free", "extra_body": {"repetition_stop_tokens": 9}},
            RepetitionStop(num_tokens=9, probability=0.99),
            None,
        ),
        ({"model": "free", "extra_body": {"repetition_stop_probability": 0.5}}, None, None),
        ({"model": "strict", "extra_body": {"repetition_stop_tokens": 0}}, None, 4),
        (
            {"extra_body": {"repetition_stop_tokens": None, "repetition_stop_probability": 0}},
            RepetitionStop(num_tokens=200, probability=0.0),
            None,
        ),
        (
            {"model": "strict", "extra_body": {"reasoning_budget": 0}, "max_tokens": 5},
            RepetitionStop(num_tokens=200, probability=0.5),
            0,
        ),
        (
            {"model": "strict", "extra_body": {"reasoning_budget": None}, "max_tokens": 10**9},
            RepetitionStop(num_tokens=200, probability=0.5),
            4,
        ),
    ]
    async with serve(over=says(tok, "Ho.", see=seen.append), model=model.model_dump()) as world:
        for fields, _, _ in asked:
            await ask(world, **fields)
        cards = {m.id: m.defaults async for m in world.client.models.list()}
    assert [limits.repetition for limits in seen] == [wanted for _, wanted, _ in asked]
    assert [limits.reasoning_budget for limits in seen] == [budget for _, _, budget in asked]
    shown = {name: card["repetition_stop_tokens"] for name, card in cards.items()}
    assert shown == {"fake": 200, "free": 0, "strict": 200}
    assert cards["strict"]["repetition_stop_probability"] == 0.5


def test_every_model_has_the_papers_stop_unless_told_otherwise() -> None:
    named = answer_defaults(ModelSettings(model_id="m"))["m"]
    assert (named.repetition_stop_tokens, named.repetition_stop_probability) == (3000, 0.99)


@pytest.mark.parametrize(
    "line",
    ["repetition_stop_tokens = -1", "repetition_stop_probability = 1.0", "repetition_stop_p = 0.9"],
)
def test_a_setting_that_cannot_be_is_refused_by_name(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=line.split()[0]):
        model_of(f"[model.aliases.x]\n{line}\n", tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("repetition_stop_tokens", bad) for bad in (-1, 1.5, "3000", True, [])],
        *[("repetition_stop_probability", bad) for bad in (1, 1.0, -0.1, 1e9, "0.99", True)],
        *[("reasoning_budget", bad) for bad in (-1, 1.5, "9", True, {})],
    ],
)
async def test_what_cannot_be_is_a_400_that_names_the_field(
    serve: Any, field: str, value: object
) -> None:
    async with serve() as world:
        for call in (
            world.client.chat.completions.create(
                model="fake", messages=HI, extra_body={field: value}
            ),
            world.client.completions.create(model="fake", prompt="Hi", extra_body={field: value}),
        ):
            with pytest.raises(openai.BadRequestError, match=field) as refused:
                await call
            assert refused.value.param == field
        assert world.engine.requests == []
        await world.client.chat.completions.create(model="fake", messages=HI)


# ---- what a client sees --------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_run_of_the_papers_length_is_stopped_by_default(
    serve: Any, tok: ChatTokenizer, is_stream: bool
) -> None:
    async with serve(over=says(tok, "Hm. " + "a" * 5000)) as world:
        told = await ask(world, is_stream=is_stream)
    # the first "a" follows a blank: it is said with less certainty
    assert told["content"] == "Hm. " + "a" * 3001
    assert (told["finish"], told["cause"]) == ("stop", "repetition")
    assert told["tokens"] == 4 + 3001
    [turn] = world.turns
    assert (turn.stop, turn.stop_detail) == (StopCause.REPETITION, "3000")
    assert (turn.finish_reason, turn.was_delivered) == ("stop", True)
    assert turn.trainable_tokens() == [True] * 5 + [False] * 3000


@pytest.mark.parametrize("is_stream", [False, True])
async def test_switched_off_a_model_may_repeat_itself(
    serve: Any, tok: ChatTokenizer, is_stream: bool
) -> None:
    async with serve(over=says(tok, "a" * 5000)) as world:
        told = await ask(world, is_stream=is_stream, extra_body={"repetition_stop_tokens": 0})
    assert (told["content"], told["finish"], told["cause"]) == ("a" * 5000, "stop", "eos")
    assert world.turns[0].stop is StopCause.EOS


async def test_the_metrics_count_it(serve: Any, tok: ChatTokenizer) -> None:
    async with serve(over=says(tok, "a" * 50)) as world:
        await ask(world, extra_body={"repetition_stop_tokens": 10})
        text = (await world.client._client.get(f"{world.url}/metrics")).text
    assert 'm1serve_turns_total{mode="train",stop="repetition"} 1.0' in text.splitlines()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_each_choice_stops_for_itself(
    serve: Any, tok: ChatTokenizer, is_stream: bool
) -> None:
    texts = ("a" * 90, "One after the other.", "bc" * 60)
    async with serve(over=says(tok, *texts)) as world:
        answer = await world.client.chat.completions.create(
            model="fake",
            messages=HI,
            n=3,
            max_tokens=80,
            stream=is_stream,
            extra_body={"repetition_stop_tokens": 20},
        )
        if is_stream:
            choices = [chunk.choices[0] async for chunk in answer]
            ended = sorted((c for c in choices if c.finish_reason), key=lambda c: c.index)
        else:
            ended = answer.choices
    told = [(choice.finish_reason, choice.stop_cause) for choice in ended]
    assert told == [("stop", "repetition"), ("stop", "eos"), ("length", "length")]
    assert [turn.stop for turn in world.turns] == [
        StopCause.REPETITION,
        StopCause.EOS,
        StopCause.LENGTH,
    ]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_text_completion_tells_it_too(
    serve: Any, tok: ChatTokenizer, is_stream: bool
) -> None:
    async with serve(over=says(tok, "a" * 90)) as world:
        answer = await world.client.completions.create(
            model="fake",
            prompt="Say a",
            stream=is_stream,
            extra_body={"repetition_stop_tokens": 20, "repetition_stop_probability": 0.9},
        )
        parts = [c.choices[0] async for c in answer] if is_stream else answer.choices
    assert "".join(part.text for part in parts) == "a" * 20
    assert (parts[-1].finish_reason, parts[-1].stop_cause) == ("stop", "repetition")
    assert all("stop_cause" not in (part.model_extra or {}) for part in parts[:-1])


@pytest.mark.parametrize("is_stream", [False, True])
async def test_whole_calls_before_a_run_are_no_leave_to_carry_them_out(
    serve: Any, tok: ChatTokenizer, is_stream: bool
) -> None:
    call = '<tool_calls>\n{"name": "look", "arguments": {}}\n</tool_calls>'
    tools: Any = [{"type": "function", "function": {"name": "look"}}]
    async with serve(over=says(tok, call + "\n" * 90)) as world:
        whole = await ask(world, is_stream=is_stream, tools=tools)
        run = await ask(
            world, is_stream=is_stream, tools=tools, extra_body={"repetition_stop_tokens": 30}
        )
    assert (whole["finish"], whole["cause"]) == ("tool_calls", "eos")
    assert (run["finish"], run["cause"]) == ("stop", "repetition")


@pytest.mark.parametrize(
    ("fields", "finish", "cause"),
    [
        ({}, "stop", "eos"),
        ({"stop": ["lo"]}, "stop", "stop_string"),
        ({"max_tokens": 2}, "length", "length"),
    ],
)
async def test_the_cause_of_every_stop_is_told(
    serve: Any, tok: ChatTokenizer, fields: dict[str, Any], finish: str, cause: str
) -> None:
    async with serve(over=says(tok, "Hello.")) as world:
        for is_stream in (False, True):
            told = await ask(world, is_stream=is_stream, **fields)
            assert (told["finish"], told["cause"]) == (finish, cause)
        by_token = {"extra_body": {"stop_token_ids": tok.encode_text("H")}}
        assert (await ask(world, **by_token))["cause"] == "stop_token"


async def test_an_answer_that_fills_the_context_says_so(serve: Any, tok: ChatTokenizer) -> None:
    async with serve(over=says(tok, "ab" * 5000)) as world:
        told = await ask(world)
    assert (told["finish"], told["cause"]) == ("length", "context")
