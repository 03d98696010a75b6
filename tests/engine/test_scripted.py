"""The scripted engine says exactly what the script says."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings
from m1serve.engine.script import Replies, ScriptedReply, replies_from_file
from m1serve.engine.scripted import ScriptedEngine
from m1serve.errors import ConfigError
from m1serve.types import Delta, GenerateRequest, Limits, Started, StopCause


def request(tok: ChatTokenizer, text: str = "hello", **fields: object) -> GenerateRequest:
    fields.setdefault("limits", Limits(max_tokens=200))
    return GenerateRequest(
        id=f"r{time.perf_counter_ns()}",
        prompt_ids=tuple(tok.encode_text(text)),
        **fields,  # type: ignore[arg-type]
    )


def engine(tok: ChatTokenizer, reply: ScriptedReply | Replies | Path) -> ScriptedEngine:
    replies = (lambda request: reply) if isinstance(reply, ScriptedReply) else reply
    settings = EngineSettings(kind="scripted", max_model_len=512)
    return ScriptedEngine(replies, tokenizer=tok, settings=settings)


async def told(
    engine: ScriptedEngine, wanted: GenerateRequest
) -> tuple[Started, dict[int, list[Delta]]]:
    started, choices = None, {}
    async for item in engine.generate(wanted):
        if isinstance(item, Started):
            started = item
        else:
            choices.setdefault(item.choice, []).append(item)
    assert started is not None
    return started, choices


def text_of(tok: ChatTokenizer, deltas: list[Delta]) -> str:
    return tok.decode([i for delta in deltas for i in delta.token_ids])


async def test_it_says_the_text_and_ends_the_sentence(tok: ChatTokenizer) -> None:
    text = (
        '<think>\nlook it up\n</think>\n<tool_calls>\n{"name": "a", "arguments": {}}\n</tool_calls>'
    )
    _, choices = await told(engine(tok, ScriptedReply(text=text)), request(tok))
    assert text_of(tok, choices[0]) == text + "<end_of_sentence>"
    assert choices[0][-1].stop is StopCause.EOS
    assert tok.control_ids["<think>"] == choices[0][0].token_ids[0]


async def test_choices_can_say_different_things(tok: ChatTokenizer) -> None:
    reply = ScriptedReply(text="one", more_texts=("two",))
    _, choices = await told(engine(tok, reply), request(tok, n=3))
    said = [text_of(tok, choices[i]).removesuffix("<end_of_sentence>") for i in range(3)]
    assert said == ["one", "two", "one"]


async def test_it_can_fail_half_way(tok: ChatTokenizer) -> None:
    reply = ScriptedReply(text="one two three", fails_after=2)
    _, choices = await told(engine(tok, reply), request(tok))
    assert sum(len(delta.token_ids) for delta in choices[0]) == 2
    assert choices[0][-1].stop is StopCause.ERROR


async def test_it_can_be_slow_and_pretend_to_have_cached(tok: ChatTokenizer) -> None:
    reply = ScriptedReply(text="hi", delay_s=0.05, cached_tokens=2)
    begin = time.monotonic()
    started, _ = await told(engine(tok, reply), request(tok))
    assert time.monotonic() - begin >= 0.05
    assert started.cached_tokens == 2


async def test_a_budget_cuts_the_thought_and_goes_on_behind_it(tok: ChatTokenizer) -> None:
    reply = ScriptedReply(text="<think>\na long and winding thought\n</think>\nThe answer.")
    limits = Limits(max_tokens=200, reasoning_budget=3)
    _, choices = await told(engine(tok, reply), request(tok, limits=limits))
    said = text_of(tok, choices[0])
    assert said.endswith("</think>\nThe answer.<end_of_sentence>")
    assert "winding" not in said


async def test_a_file_answers_by_prompt_and_in_turn(tok: ChatTokenizer, tmp_path: Path) -> None:
    lines = [{"text": "about orders", "when": "order"}, {"text": "first"}, {"text": "second"}]
    file = tmp_path / "script.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    scripted = engine(tok, file)
    said = []
    for prompt in ("an order", "x", "y", "my order", "z"):
        _, choices = await told(scripted, request(tok, prompt))
        said.append(text_of(tok, choices[0]).removesuffix("<end_of_sentence>"))
    assert said == ["about orders", "first", "second", "about orders", "first"]


@pytest.mark.parametrize(
    "content", ["{", '{"when": "a"}', '{"text": "a", "speed": 3}', '{"text": "a", "when": "b"}']
)
def test_a_bad_script_is_refused(tok: ChatTokenizer, tmp_path: Path, content: str) -> None:
    file = tmp_path / "script.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"script\.jsonl"):
        replies_from_file(file, tok)


def test_a_missing_script_is_refused(tok: ChatTokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        replies_from_file(tmp_path / "absent.jsonl", tok)
