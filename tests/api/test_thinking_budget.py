"""The thinking budget over HTTP: what is said, counted, flagged and trained."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.chat.tokenizer import TAGS, ChatTokenizer
from m1serve.engine.admission import check_request
from m1serve.engine.script import ScriptedReply
from m1serve.engine.scripted import ScriptedEngine
from m1serve.errors import RequestError
from m1serve.types import GenerateRequest, Limits, TokenFlag

HI: Any = [{"role": "user", "content": "Hi"}]
THOUGHT = "abcdefghijklmnopqrstuvwxyz" * 3


@pytest.fixture(params=["one token", "spelled"])
def either(request: pytest.FixtureRequest) -> ChatTokenizer:
    """M1's own vocabulary spells its tags with several tokens, nano's has one for each."""
    return byte_tokenizer(tags=TAGS if request.param == "one token" else ())


def says(tok: ChatTokenizer, text: str) -> ScriptedEngine:
    return ScriptedEngine(lambda _: ScriptedReply(text=text), tokenizer=tok)


async def ask(world: Any, *, is_stream: bool, budget: int) -> tuple[str, str, Any]:
    """Reasoning, content and usage."""
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}} if is_stream else {}
    answer = await world.client.chat.completions.create(
        model="fake",
        messages=HI,
        stream=is_stream,
        extra_body={"reasoning_budget": budget},
        **fields,
    )
    chunks = [chunk async for chunk in answer] if is_stream else [answer]
    parts = [c.choices[0] for c in chunks if c.choices]
    said = [part.delta if is_stream else part.message for part in parts]
    assert (parts[-1].finish_reason, parts[-1].stop_cause) == ("stop", "eos")
    thought = "".join(getattr(part, "reasoning_content", None) or "" for part in said)
    return thought, "".join(part.content or "" for part in said), chunks[-1].usage


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 7, 40])
async def test_a_budget_closes_the_block_and_is_counted_exactly(
    serve: Any, either: ChatTokenizer, budget: int, is_stream: bool
) -> None:
    tok, opening = either, either.encode_control("<think>")
    engine = says(tok, f"<think>{THOUGHT}</think>\nDone.")
    async with serve(over=engine, tok=tok) as world:
        thought, content, usage = await ask(world, is_stream=is_stream, budget=budget)
        [turn] = world.turns
    assert (thought, content) == (THOUGHT[:budget], "Done.")
    num_tags = len(opening) + len(tok.encode_control("</think>"))
    assert usage.completion_tokens_details.reasoning_tokens == budget + num_tags
    closing, start = tok.encode_control("</think>\n"), len(opening) + budget
    assert list(turn.completion_ids[start : start + len(closing)]) == closing
    runs = [(flag, len(list(group))) for flag, group in groupby(turn.token_flags)]
    assert runs == [
        (TokenFlag.SAMPLED, start),
        (TokenFlag.FORCED, len(closing)),
        (TokenFlag.SAMPLED, len(tok.encode_control("Done.")) + 1),
    ]
    assert turn.trainable_tokens() == [flag == TokenFlag.SAMPLED for flag in turn.token_flags]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("begun", [2, 5, 7])
async def test_a_block_that_was_just_being_closed_is_closed_cleanly(
    serve: Any, is_stream: bool, begun: int
) -> None:
    tok = byte_tokenizer(tags=())
    async with serve(over=says(tok, "<think>hm</think>\nDone."), tok=tok) as world:
        said = await ask(world, is_stream=is_stream, budget=2 + begun)
        [turn] = world.turns
    assert said[:2] == ("hm", "Done.")
    assert tok.decode(turn.completion_ids) == "<think>hm</think>\nDone.<end_of_sentence>"
    assert turn.token_flags.count(TokenFlag.FORCED) == len("</think>\n") - begun


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_thought_within_its_budget_is_left_alone(
    serve: Any, either: ChatTokenizer, is_stream: bool
) -> None:
    engine = says(either, "<think>hm</think>\nDone.")
    async with serve(over=engine, tok=either) as world:
        thought, content, _ = await ask(world, is_stream=is_stream, budget=10)
        [turn] = world.turns
    assert (thought, content) == ("hm", "Done.")
    assert set(turn.token_flags) == {TokenFlag.SAMPLED}


@pytest.mark.parametrize("budget", [0, 5, None])
async def test_a_block_that_the_prompt_opened_is_counted_and_closed(
    serve: Any, either: ChatTokenizer, budget: int | None
) -> None:
    engine = says(either, "abcdefghijklmn</think>\nDone.")
    async with serve(over=engine, tok=either) as world:
        answer = await world.client.completions.create(
            model="fake", prompt="Think.<think>\n", extra_body={"reasoning_budget": budget}
        )
    num_thought = 14 if budget is None else budget
    assert answer.choices[0].text == "abcdefghijklmn"[:num_thought] + "</think>\nDone."
    reasoning = answer.usage.completion_tokens_details.reasoning_tokens
    assert reasoning == num_thought + len(either.encode_control("</think>"))


async def test_an_engine_that_cannot_close_it_refuses_by_name(tok: ChatTokenizer) -> None:
    can = says(tok, "Done.").capabilities
    request = GenerateRequest(
        id="r", prompt_ids=(5,), limits=Limits(max_tokens=9, reasoning_budget=4)
    )
    check_request(request, can)
    with pytest.raises(RequestError, match="reasoning") as refused:
        check_request(request, replace(can, has_reasoning_budget=False))
    assert refused.value.param == "reasoning_budget"
