"""POST /v1/completions through the real client."""

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest

from m1serve.api import live_response
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings
from m1serve.engine.script import ScriptedReply, made_up_logprob
from m1serve.engine.scripted import ScriptedEngine
from m1serve.types import GenerateRequest

Replies = Callable[[GenerateRequest], ScriptedReply]


def scripted(tok: ChatTokenizer, *texts: str, **settings: Any) -> ScriptedEngine:
    """Says the texts to the choices in turn, and to each prompt the same."""
    reply = ScriptedReply(text=texts[0], more_texts=texts[1:])
    settings = {"num_slots": 8, "max_model_len": 256, **settings}
    return ScriptedEngine(
        lambda _: reply, tokenizer=tok, settings=EngineSettings(kind="scripted", **settings)
    )


@pytest.fixture
async def world(serve: Any, tok: ChatTokenizer) -> Any:
    async with serve(over=scripted(tok, "Hello there.")) as world:
        yield world


async def ask(world: Any, prompt: Any = "Once", **more: Any) -> Any:
    return await world.client.completions.create(model="fake", prompt=prompt, **more)


async def stream(world: Any, prompt: Any = "Once", **more: Any) -> list[Any]:
    return [chunk async for chunk in await ask(world, prompt, stream=True, **more)]


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index)


async def post(world: Any, body: object) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(verify=False) as http:
        return await http.post(f"{world.url}/v1/completions", content=content)


async def test_an_answer_has_openais_shape(world: Any) -> None:
    answer = await ask(world)
    [choice] = answer.choices
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert (answer.model, answer.system_fingerprint) == ("fake", "scripted@0")
    assert (choice.text, choice.index, choice.finish_reason) == ("Hello there.", 0, "stop")
    assert choice.logprobs is None
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.total_tokens == 4 + answer.usage.completion_tokens


async def test_a_stream_has_its_order_and_says_the_same(world: Any) -> None:
    chunks = await stream(world, stream_options={"include_usage": True})
    assert text_of(chunks) == "Hello there."
    finishes = [c.finish_reason for chunk in chunks for c in chunk.choices]
    assert finishes == [None] * (len(finishes) - 1) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len("Hello there.") + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({(c.id, c.object, c.created, c.model) for c in chunks}) == 1
    assert all(chunk.choices for chunk in await stream(world))


async def test_tags_and_calls_are_text(serve: Any, tok: ChatTokenizer) -> None:
    text = '<think>\nhm\n</think>\n<tool_calls>\n{"name": "f", "arguments": {}}\n</tool_calls>'
    async with serve(over=scripted(tok, text)) as world:
        answer = (await ask(world)).choices[0]
        streamed = await stream(world)
    assert (answer.text, answer.finish_reason) == (text, "stop")
    assert text_of(streamed) == text


PROMPTS = {
    "text": ("ab", 1),
    "texts": (["ab", "cd", "é🙂"], 3),
    "ids": ([5, 6, 7], 1),
    "lists of ids": ([[5, 6], [7]], 2),
}


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("large", [1, 65_536])
async def test_every_kind_of_prompt_is_read(
    world: Any,
    tok: ChatTokenizer,
    kind: str,
    is_stream: bool,
    large: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large prompts are written beside the event loop."""
    monkeypatch.setattr(live_response, "LARGE_PROMPT", large)
    prompt, num = PROMPTS[kind]
    more: Any = {"extra_body": {"return_token_ids": True}, "n": 2}
    if is_stream:
        chunks = await stream(world, prompt, **more)
        openings = [c for chunk in chunks for c in chunk.choices if hasattr(c, "prompt_token_ids")]
        said = {c.index: tuple(c.prompt_token_ids) for c in openings}
        texts = [text_of(chunks, index) for index in range(2 * num)]
    else:
        choices = (await ask(world, prompt, **more)).choices
        tell = [c for c in choices if hasattr(c, "prompt_token_ids")]
        said = {c.index: tuple(c.prompt_token_ids) for c in tell}
        texts = [c.text for c in choices]
    many: Any = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    ids = [tuple(tok.encode_text(p) if isinstance(p, str) else p) for p in many]
    assert said == {2 * place: ids[place] for place in range(num)}
    assert texts == ["Hello there."] * 2 * num


async def test_control_tokens_come_from_ids_only(world: Any, tok: ChatTokenizer) -> None:
    for prompt in ("<end_of_sentence>", [tok.eos_id]):
        await ask(world, prompt)
    text, ids = (turn.prompt_ids for turn in world.turns)
    assert tok.eos_id not in text
    assert ids == (tok.eos_id,)


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [[1], []], None, 7, [1, "a"]])
async def test_an_empty_prompt_is_refused_and_the_next_is_fine(world: Any, prompt: Any) -> None:
    answer = await post(world, {"model": "fake", "prompt": prompt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("prompt")
    assert (await post(world, {"model": "fake", "prompt": "a"})).status_code == 200


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown ids": ({"prompt": [5, 10**9]}, "prompt"),
    "negative ids": ({"prompt": [[5], [-1]]}, "prompt"),
    "huge ids": ({"prompt": [10**40]}, "prompt"),
    "too many prompts": ({"prompt": ["a"] * 2000}, "prompt"),
    "too many choices": ({"prompt": ["a"] * 100, "n": 64}, "prompt"),
    "huge n": ({"n": 100_000}, "n"),
    "six logprobs": ({"logprobs": 6}, "logprobs"),
    "negative logprobs": ({"logprobs": -1}, "logprobs"),
    "chat's logprobs": ({"logprobs": True}, "logprobs"),
    "the best of two": ({"best_of": 2}, "best_of"),
    "a suffix": ({"suffix": "x"}, "suffix"),
    "negative max_tokens": ({"max_tokens": -1}, "max_tokens"),
    "five stops": ({"stop": list("abcde")}, "stop"),
    "an unknown bias": ({"logit_bias": {"999999": 1}}, "logit_bias"),
    "an overlong prompt": ({"prompt": "x" * 300}, "prompt"),
    "a full context": ({"prompt": "x" * 256}, "prompt"),
}


async def test_bad_fields_are_refused_by_name_and_the_server_goes_on(world: Any) -> None:
    for name, (field, param) in REFUSED.items():
        answer = await post(world, {"model": "fake", "prompt": "a", **field})
        error = answer.json()["error"]
        assert (name, answer.status_code, error["param"]) == (name, 400, param)
    for body in (b'{"model": "fake", "prompt": "\\ud800"}', b'{"model": "fake", "prompt": NaN}'):
        assert (await post(world, body)).status_code == 400
    same = {"best_of": 1, "suffix": "", "user": "u", "nobody_knows": 1, "stream_options": None}
    assert (await post(world, {"model": "fake", "prompt": "a", **same})).status_code == 200
    assert world.engine.stats().num_running == 0


async def test_overflow_has_openais_code_and_words(world: Any) -> None:
    with pytest.raises(
        openai.BadRequestError, match="This model's maximum context length is 256 tokens"
    ) as caught:
        await ask(world, "x" * 300)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_echo_and_logprobs_line_up(
    world: Any, tok: ChatTokenizer, count: int, is_stream: bool
) -> None:
    how: Any = {"echo": True, "logprobs": count, "max_tokens": 4}
    if is_stream:
        parts = [c for chunk in await stream(world, "Zoë 🙂", **how) for c in chunk.choices]
        text = "".join(part.text for part in parts)
        shown = [part.logprobs for part in parts if part.logprobs is not None]
    else:
        [choice] = (await ask(world, "Zoë 🙂", **how)).choices
        text, shown = choice.text, [choice.logprobs]
    assert text == "Zoë 🙂Hell"
    tokens = [t for part in shown for t in part.tokens]
    logprobs = [p for part in shown for p in part.token_logprobs]
    offsets = [o for part in shown for o in part.text_offset]
    ids = [*tok.encode_text("Zoë 🙂"), *tok.encode_text("Hell")]
    assert len(tokens) == len(logprobs) == len(offsets) == len(ids)
    assert logprobs[0] is None
    assert logprobs[1:] == [made_up_logprob(a, b) for a, b in pairwise(ids)]
    assert tokens[-4:] == ["H", "e", "l", "l"]
    assert tokens[2] == "bytes:\\xc3"
    assert [text[o] for o in offsets[-4:]] == ["H", "e", "l", "l"]
    assert offsets == sorted(offsets)
    if count == 0:
        assert all(part.top_logprobs is None for part in shown)
        return
    top = [row for part in shown for row in part.top_logprobs]
    assert top[0] is None
    assert all(1 <= len(row) <= count + 1 for row in top[1:])
    assert [row[t] for row, t in zip(top[1:], tokens[1:], strict=True)] == logprobs[1:]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_no_tokens_score_the_prompt(world: Any, is_stream: bool) -> None:
    how: Any = {"echo": True, "logprobs": 1, "max_tokens": 0}
    if is_stream:
        chunks = await stream(world, ["abc", "de"], **how)
        first = [c for chunk in chunks for c in chunk.choices if c.logprobs is not None]
        first.sort(key=lambda choice: choice.index)
        finish = {c.finish_reason for chunk in chunks for c in chunk.choices} - {None}
    else:
        answer = await ask(world, ["abc", "de"], **how)
        first, finish = answer.choices, {c.finish_reason for c in answer.choices}
        assert answer.usage.completion_tokens == 0
        assert answer.usage.prompt_tokens == 5
    assert [c.text for c in first] == ["abc", "de"]
    assert [c.logprobs.tokens for c in first] == [["a", "b", "c"], ["d", "e"]]
    assert [len(c.logprobs.token_logprobs) for c in first] == [3, 2]
    assert [[row and len(row) for row in c.logprobs.top_logprobs] for c in first] == [
        [None, 1, 1],
        [None, 1],
    ]
    assert finish == {"length"}
    assert (await ask(world)).choices[0].text == "Hello there."


async def test_a_whole_context_can_be_scored(world: Any) -> None:
    answer = await ask(world, "x" * 256, echo=True, logprobs=0, max_tokens=0)
    assert len(answer.choices[0].logprobs.tokens) == 256


async def test_logprobs_without_echo_are_the_answers(world: Any, tok: ChatTokenizer) -> None:
    [choice] = (await ask(world, logprobs=1)).choices
    assert "".join(choice.logprobs.tokens) == "Hello there.<end_of_sentence>"
    assert choice.logprobs.text_offset == [*range(12), 12]
    assert all(p < 0 for p in choice.logprobs.token_logprobs)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_stop_string_is_never_shown(world: Any, is_stream: bool) -> None:
    if is_stream:
        chunks = await stream(world, stop=["o th", "never"])
        text, finish = text_of(chunks), chunks[-1].choices[0].finish_reason
    else:
        [choice] = (await ask(world, stop=["o th", "never"])).choices
        text, finish = choice.text, choice.finish_reason
    assert (text, finish) == ("Hell", "stop")


async def test_an_answer_is_as_long_as_there_is_room(serve: Any, tok: ChatTokenizer) -> None:
    async with serve(over=scripted(tok, "word " * 100)) as world:
        answers = [await ask(world, max_tokens=most) for most in (10, None, 10**6)]
    assert [a.usage.completion_tokens for a in answers] == [10, 252, 252]
    stops = [turn.stop for turn in world.turns]
    assert {a.choices[0].finish_reason for a in answers} == {"length"}
    assert stops == ["length", "context", "context"]


async def test_choices_differ_and_are_one_group(serve: Any, tok: ChatTokenizer) -> None:
    async with serve(over=scripted(tok, "one", "two")) as world:
        answer = await ask(world, ["a", "b"], n=2)
        turns = world.turns
    assert [c.text for c in answer.choices] == ["one", "two"] * 2
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert len({turn.group_key for turn in turns}) == 2
    assert len({turn.request_id for turn in turns}) == 2


async def test_every_prompt_is_a_turn_in_the_ledger(world: Any, tok: ChatTokenizer) -> None:
    raw = await world.client.completions.with_raw_response.create(
        model="fake", prompt=["ab", "cd"], seed=5
    )
    sessions = raw.headers["x-m1-session-id"].split(",")
    turns = sorted(world.turns, key=lambda turn: turn.prompt_ids)
    assert [tok.decode(turn.prompt_ids) for turn in turns] == ["ab", "cd"]
    assert sorted(turn.session_id for turn in turns) == sorted(sessions)
    assert raw.headers["x-m1-turn-id"].split(",") == [turn.turn_id for turn in turns]
    assert len({turn.request_hash for turn in turns}) == 2
    for turn in turns:
        assert tok.decode(turn.completion_ids) == "Hello there.<end_of_sentence>"
        assert len(turn.completion_ids) == len(turn.logprobs)
        assert (turn.was_delivered, turn.sampling.seed) == (True, 5)
    await ask(world, extra_headers={"x-m1-mode": "off"})
    assert len(world.turns) == 2


async def test_every_streamed_prompt_is_a_turn_once(world: Any, tok: ChatTokenizer) -> None:
    await stream(world, ["ab", "cd", "ef"], n=2)
    turns = [(tok.decode(turn.prompt_ids), turn.choice, turn.was_delivered) for turn in world.turns]
    assert sorted(turns) == [(text, i, True) for text in ("ab", "cd", "ef") for i in (0, 1)]


async def test_a_session_can_be_named(world: Any) -> None:
    await ask(world, ["a", "b"], extra_headers={"x-m1-session-id": "mine"})
    assert [turn.session_id for turn in world.turns] == ["mine"] * 2


async def test_a_failure_of_one_prompt_fails_the_request(serve: Any, tok: ChatTokenizer) -> None:
    def reply(request: GenerateRequest) -> ScriptedReply:
        return ScriptedReply(text="fine", fails_after=1 if len(request.prompt_ids) == 2 else None)

    engine = ScriptedEngine(reply, tokenizer=tok)
    async with serve(over=engine) as world:
        answer = await post(world, {"model": "fake", "prompt": ["a", "bb", "c"]})
        assert answer.status_code == 500
        streamed = await post(world, {"model": "fake", "prompt": ["a", "bb"], "stream": True})
        assert '"error"' in streamed.text.rpartition("data: ")[2]
        assert engine.stats().num_running == engine.stats().num_waiting == 0
        assert (await ask(world, "a")).choices[0].text == "fine"


async def test_a_full_engine_is_a_503_to_retry(serve: Any, tok: ChatTokenizer) -> None:
    engine = scripted(tok, "x", num_slots=1, max_waiting=2)
    async with serve(over=engine) as world:
        answer = await post(world, {"model": "fake", "prompt": list("abcdef")})
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        assert engine.stats().num_waiting == engine.stats().num_running == 0
        assert (await ask(world)).choices[0].text == "x"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_frees_every_slot(
    serve: Any, tok: ChatTokenizer, eventually: Any, is_stream: bool
) -> None:
    endless = ScriptedReply(text="word " * 40, step_s=0.05)
    engine = ScriptedEngine(lambda _: endless, tokenizer=tok)
    async with serve(over=engine) as world, httpx.AsyncClient(verify=False) as http:
        body = {"model": "fake", "prompt": ["a", "b", "c"], "stream": is_stream}
        url = f"{world.url}/v1/completions"
        asking = asyncio.create_task(http.post(url, json=body))
        await eventually(lambda: engine.stats().sampled_tokens >= 6)
        asking.cancel()
        await eventually(lambda: engine.stats().num_running == 0)
        await eventually(lambda: len(world.turns) == 3)
        assert {turn.stop for turn in world.turns} == {"abort"}
