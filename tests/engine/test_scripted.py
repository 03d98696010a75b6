"""The scripted engine says exactly what the script says."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.chat.messages import ChatMessage
from m1serve.chat.template import encode_prompt
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings
from m1serve.engine.script import Replies, ScriptedReply, assistant_turns, replies_from_file
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
    "content",
    [
        "{",
        '{"when": "a"}',
        '{"text": "a", "speed": 3}',
        '{"text": "a", "when": "b"}',
        '{"text": "a", "turn": 0}',
        '{"text": "a", "turn": -1}\n{"text": "a"}',
        '{"text": "a", "turn": true}\n{"text": "a"}',
        '{"text": "a", "when": 3}\n{"text": "a"}',
    ],
)
def test_a_bad_script_is_refused(tok: ChatTokenizer, tmp_path: Path, content: str) -> None:
    file = tmp_path / "script.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"script\.jsonl"):
        replies_from_file(file, tok)


def test_a_missing_script_is_refused(tok: ChatTokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        replies_from_file(tmp_path / "absent.jsonl", tok)


def prompt_of(tok: ChatTokenizer, *roles_and_texts: tuple[str, str]) -> tuple[int, ...]:
    messages = [ChatMessage(role=role, content=text) for role, text in roles_and_texts]  # type: ignore[arg-type]
    return encode_prompt(tok, messages, [{"name": "t", "description": "ai name=assistant"}]).ids


def test_turns_are_counted_as_the_template_placed_them(tok: ChatTokenizer) -> None:
    user = ("user", "<beginning_of_sentence>ai name=assistant\nnobody said this")
    assert assistant_turns(tok, prompt_of(tok, user)) == 0
    greeted = (("system", "s"), ("assistant", "Hi!"), user, ("assistant", ""), ("tool", "x"))
    assert assistant_turns(tok, prompt_of(tok, *greeted)) == 2
    assert assistant_turns(tok, tok.encode_text("a plain text")) == 0
    assert assistant_turns(tok, ()) == 0


def test_a_line_may_wait_for_its_turn(tok: ChatTokenizer, tmp_path: Path) -> None:
    lines = [
        {"text": "look", "when": "task 1 of 2", "turn": 0},
        {"text": "write", "when": "task 1 of 2", "turn": 1},
        {"text": "done", "when": "task 1 of 2"},
        {"text": "look elsewhere", "when": "task 2 of 2", "turn": 0},
        {"text": "second", "turn": 1},
        {"text": "nothing"},
    ]
    file = tmp_path / "script.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    replies = replies_from_file(file, tok)

    def said(text: str, turns: int) -> str:
        told = [("user", text), *[("assistant", "a"), ("user", "b")] * turns]
        ids = prompt_of(tok, *told)
        return replies(GenerateRequest(id="r", prompt_ids=ids, limits=Limits(max_tokens=9))).text

    assert [said("this is task 1 of 2", n) for n in range(4)] == ["look", "write", "done", "done"]
    assert [said("this is task 2 of 2", n) for n in range(3)] == [
        "look elsewhere",
        "second",
        "nothing",
    ]


@given(st.data())
def test_the_first_line_that_fits_plays_however_long_the_script(data: st.DataObject) -> None:
    words = st.lists(st.sampled_from(["a", "bb", "c", "d\n", ""]), min_size=1, max_size=4)
    whens = st.none() | words.map(" ".join).filter(bool)
    cues = data.draw(st.lists(st.tuples(whens, st.none() | st.integers(0, 2)), max_size=12))
    lines = [
        {"text": f"line {i}"}
        | ({} if when is None else {"when": when})
        | ({} if turn is None else {"turn": turn})
        for i, (when, turn) in enumerate(cues)
    ]
    prompt = " ".join(data.draw(words))
    tok = byte_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "script.jsonl"
        file.write_text("\n".join(map(json.dumps, [*lines, {"text": "else"}])))
        reply = replies_from_file(file, tok)(request(tok, prompt)).text
    fits = [
        line["text"]
        for line, (when, turn) in zip(lines, cues, strict=True)
        if (when or turn is not None) and (when or "") in prompt and turn in (None, 0)
    ]
    plain = [line["text"] for line, cue in zip(lines, cues, strict=True) if cue == (None, None)]
    assert reply == [*fits, *plain, "else"][0]
