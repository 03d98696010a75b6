"""Parameters through the real client: what reaches the engine, and what a model makes of it."""

import asyncio
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from pydantic import ValidationError

from m1serve.api.schema import ChatRequest, CompletionRequest, parse_body
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings
from m1serve.engine.local import LocalEngine
from m1serve.engine.script import ScriptedReply
from m1serve.engine.scripted import ScriptedEngine
from m1serve.errors import EngineAwayError, OverloadedError, RequestError
from m1serve.model.checkpoint import load_model
from m1serve.model.tiny import tiny_model_dir
from m1serve.model.weights import version_path, write_version
from m1serve.types import VersionRef

HI: Any = [{"role": "user", "content": "Hi"}]
NUM = 16


async def ask(world: Any, **more: Any) -> Any:
    return await world.client.chat.completions.create(model="fake", messages=HI, **more)


async def post(world: Any, body: object, path: str = "/v1/chat/completions") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(verify=False) as http:
        return await http.post(f"{world.url}{path}", content=content)


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> VersionRef:
    """A random model of M1's architecture."""
    root = tmp_path_factory.mktemp("weights")
    model_dir = tiny_model_dir(root / "model", seed=0)
    write_version(
        root,
        weights_version="tiny@0",
        model=load_model(model_dir),
        tokenizer_file=model_dir / "tokenizer.json",
        parent=None,
        run_id=None,
        golden_prompts=[list(range(10, 30))],
    )
    return VersionRef(weights_version="tiny@0", path=str(version_path(root, "tiny@0")))


@pytest.fixture
async def tiny(serve: Any, version: VersionRef) -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tok = ChatTokenizer.load(Path(version.path) / "serving")
    settings = EngineSettings(num_slots=8, max_model_len=256)
    engine = LocalEngine.start(version, settings=settings, tokenizer=tok)
    async with serve(over=engine, tok=tok) as world:
        yield world
    await engine.close()
    torch.set_num_threads(threads)


async def said(world: Any, **more: Any) -> list[int]:
    """Sampled ids of an answer that does not end by itself."""
    bias = {str(world.engine._tokenizer.eos_id): -100, **more.pop("logit_bias", {})}
    more.setdefault("max_tokens", NUM)
    more["extra_body"] = {"return_token_ids": True, **more.get("extra_body", {})}
    answer = await ask(world, logit_bias=bias, **more)
    return list(answer.choices[0].token_ids)


async def test_a_seed_repeats_an_answer_and_another_does_not(tiny: Any) -> None:
    first, again, other = [await said(tiny, seed=seed) for seed in (1, 1, 2)]
    assert first == again != other


async def test_what_leaves_one_token_is_the_greedy_answer(tiny: Any) -> None:
    greedy = await said(tiny, temperature=0)
    assert await said(tiny, temperature=1e-300) == greedy
    assert await said(tiny, extra_body={"top_k": 1}) == greedy
    assert await said(tiny, extra_body={"min_p": 1}) == greedy
    assert await said(tiny, top_p=1e-9) == greedy
    hot = {tuple(await said(tiny, temperature=2, seed=seed)) for seed in range(3)}
    assert len(hot) == 3
    assert tuple(greedy) not in hot


async def test_truncation_keeps_as_many_as_it_says(tiny: Any) -> None:
    """Drawn many times at one place: no more than top_k tokens, and all of them."""
    for more, most in (({"extra_body": {"top_k": 3}}, 3), ({}, 32)):
        answer = await ask(tiny, n=32, max_tokens=1, logprobs=True, top_logprobs=3, seed=3, **more)
        drawn = Counter(
            choice.logprobs.content[0].token for choice in answer.choices if choice.logprobs.content
        )
        likely = {top.token for top in answer.choices[0].logprobs.content[0].top_logprobs}
        if most == 3:
            assert set(drawn) == likely
        else:
            assert len(drawn) > 3


async def test_a_bias_forces_and_forbids(tiny: Any) -> None:
    assert await said(tiny, logit_bias={"40": 100}) == [40] * NUM
    greedy = await said(tiny, temperature=0)
    without = await said(tiny, temperature=0, logit_bias={str(greedy[0]): -100})
    assert greedy[0] not in without


@pytest.mark.parametrize(
    "penalty",
    [{"frequency_penalty": 2}, {"presence_penalty": 2}, {"extra_body": {"repetition_penalty": 2}}],
    ids=lambda penalty: str(penalty),
)
async def test_a_penalty_makes_a_liked_token_rarer(tiny: Any, penalty: dict[str, Any]) -> None:
    liked = {str(token): 21 - 0.25 * token / 40 for token in (40, 41, 42, 43)}
    plain = await said(tiny, temperature=0, logit_bias=liked)
    changed = await said(tiny, temperature=0, logit_bias=liked, **penalty)
    assert len(set(plain)) < len(set(changed))
    assert set(changed) <= {40, 41, 42, 43}


async def test_stop_tokens_and_strings_end_an_answer_and_are_not_shown(tiny: Any) -> None:
    tok: ChatTokenizer = tiny.engine._tokenizer
    [letter] = tok.encode_text("x")
    likes = {str(letter): 100, str(tok.eos_id): -100}
    for is_stream in (False, True):
        for more in ({"stop": "xxx"}, {"extra_body": {"stop_token_ids": [letter]}}):
            how: Any = {"logit_bias": likes, "max_tokens": 9, "stream": is_stream, **more}
            answer = await ask(tiny, **how)
            if is_stream:
                chunks = [chunk.choices[0] async for chunk in answer]
                text = "".join(chunk.delta.content or "" for chunk in chunks)
                finish = chunks[-1].finish_reason
            else:
                text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
            assert (text, finish) == ("", "stop")


async def test_what_is_shown_as_logprob_is_the_models_own(tiny: Any) -> None:
    cold = await ask(tiny, temperature=0, logprobs=True, top_logprobs=20, max_tokens=5)
    for entry in cold.choices[0].logprobs.content:
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) < 1
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token


async def test_a_scored_prompt_is_the_answer_taught_again(tiny: Any) -> None:
    how: Any = {"model": "fake", "logprobs": 0, "seed": 1}
    first = await tiny.client.completions.create(
        prompt="Once", max_tokens=8, extra_body={"return_token_ids": True}, **how
    )
    ids = [*first.choices[0].prompt_token_ids, *first.choices[0].token_ids]
    again = await tiny.client.completions.create(prompt=ids, max_tokens=0, echo=True, **how)
    taught = again.choices[0].logprobs.token_logprobs
    num = len(first.choices[0].token_ids)
    assert taught[-num:] == pytest.approx(first.choices[0].logprobs.token_logprobs, abs=1e-5)


async def test_a_harness_learns_whether_a_continuation_is_the_greedy_one(tiny: Any) -> None:
    """As the evaluation harness reads it: the largest of the tops is the token's own."""
    how: Any = {"model": "fake", "logprobs": 1, "temperature": 0}
    said = await tiny.client.completions.create(
        prompt="Once", max_tokens=6, extra_body={"return_token_ids": True}, **how
    )
    greedy, start = list(said.choices[0].token_ids)[:-1], said.choices[0].prompt_token_ids
    other = [*greedy[:-1], (greedy[-1] + 1) % 256]
    for continuation, is_greedy in ((greedy, True), (other, False)):
        answer = await tiny.client.completions.create(
            prompt=[*start, *continuation], max_tokens=1, echo=True, **how
        )
        shown = answer.choices[0].logprobs
        own, top = shown.token_logprobs[len(start) : -1], shown.top_logprobs[len(start) : -1]
        assert len(own) == len(continuation)
        found = [p == max(row.values()) for p, row in zip(own, top, strict=True)]
        assert all(found) == is_greedy


def thinker(tok: ChatTokenizer, thought: str, answer: str) -> ScriptedEngine:
    reply = ScriptedReply(text=f"<think>\n{thought}\n</think>\n{answer}")
    return ScriptedEngine(lambda _: reply, tokenizer=tok)


@pytest.mark.parametrize(("applies_to", "content"), [("answer", "a" * 29), ("all", "")])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_small_maximum_does_not_starve_the_answer(
    serve: Any, tok: ChatTokenizer, applies_to: str, content: str, is_stream: bool
) -> None:
    alias = {"max_tokens_applies_to": applies_to, "reasoning_budget": 80}
    model = {"model_id": "fake", "aliases": {"gpt-4o-2024-05-13": alias}}
    async with serve(over=thinker(tok, "t" * 500, "a" * 500), model=model) as world:
        answer = await world.client.chat.completions.create(
            model="gpt-4o-2024-05-13", messages=HI, max_tokens=30, stream=is_stream
        )
        if is_stream:
            chunks = [chunk.choices[0] async for chunk in answer]
            text = "".join(chunk.delta.content or "" for chunk in chunks)
            finish = chunks[-1].finish_reason
        else:
            text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
            thought = answer.usage.completion_tokens_details.reasoning_tokens
            num_answer = answer.usage.completion_tokens - thought
            assert num_answer == (30 if applies_to == "answer" else 0)
    # the line break behind the block is the answer's first token
    assert (text, finish) == (content, "length")


async def test_max_completion_tokens_wins_and_null_is_the_rest(serve: Any) -> None:
    async with serve() as world:
        await ask(world, max_tokens=5, max_completion_tokens=3)
        await ask(world, max_tokens=5, max_completion_tokens=None)
        await ask(world, max_tokens=None)
        await ask(world, max_tokens=10**9)
    limits = [request.limits.max_tokens for request in world.engine.requests]
    assert limits == [3, 5, 4096, 4096]


async def test_logprobs_need_no_top(serve: Any) -> None:
    async with serve("Zoë.") as world:
        answer = await ask(world, logprobs=True)
        none = await ask(world, logprobs=False)
    entries = answer.choices[0].logprobs.content
    assert [entry.top_logprobs for entry in entries] == [[]] * len(entries)
    assert bytes(b for entry in entries for b in entry.bytes).decode() == "Zoë."
    assert none.choices[0].logprobs is None


IGNORED: dict[str, Any] = {
    "service_tier": "auto", "reasoning_effort": "high", "user": "u", "verbosity": "low",
    "ignore_eos": False, "chat_template_kwargs": {"enable_thinking": False}, "guided_thing": 1,
    "parallel_tool_calls": None, "tools": [], "tool_choice": None, "response_format": None,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True, "other": 1},
    "prediction": {"type": "content", "content": "x"}, "safety_identifier": "s",
}  # fmt: skip


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_is_ignored_changes_nothing(serve: Any, is_stream: bool) -> None:
    async with serve() as world:
        for name, value in [("nothing", None), *IGNORED.items()]:
            body = {"model": "fake", "messages": HI, "stream": is_stream, name: value}
            answer = await post(world, body)
            assert (name, answer.status_code) == (name, 200)
        body = {"model": "fake", "messages": HI, "stream": is_stream, "stream_options": None}
        assert (await post(world, body)).status_code == 200
        first, *others = world.engine.requests
    for request in others:
        assert request.prompt_ids == first.prompt_ids
        assert (request.sampling, request.limits) == (first.sampling, first.limits)


async def test_nulls_are_as_good_as_nothing(serve: Any) -> None:
    names = "temperature top_p n stop max_tokens presence_penalty seed logit_bias logprobs store"
    async with serve() as world:
        nulls = dict.fromkeys((*names.split(), "top_logprobs", "metadata", "user", "top_k"))
        assert (await post(world, {"model": "fake", "messages": HI, **nulls})).status_code == 200


HOSTILE = [
    *(b'"temperature": NaN', b'"temperature": Infinity', b'"temperature": 999999'),
    *(b'"temperature": -1', b'"top_p": -Infinity', b'"top_p": 0', b'"min_p": 2'),
    *(b'"presence_penalty": NaN', b'"frequency_penalty": 1e999', b'"repetition_penalty": 0'),
    *(b'"repetition_penalty": 1e-300', b'"n": 100000', b'"n": -1', b'"n": 1.5', b'"n": true'),
    *(b'"seed": 1e400', b'"seed": 99999999999999999999999', b'"top_k": -2'),
    *(b'"stop_token_ids": [-1]', b'"stop_token_ids": [99999999999999999999]'),
    *(b'"logit_bias": {"-1": 1}', b'"logit_bias": {"99999999999999999999": 1}'),
    *(b'"logit_bias": {"5": NaN}', b'"logit_bias": {"\xd9\xa3": 1}', b'"logit_bias": [1]'),
    *(b'"logprobs": true, "top_logprobs": 21', b'"logprobs": true, "top_logprobs": -1'),
    *(b'"stop": ["\\ud800"]', b'"stop": ["a","b","c","d","e"]', b'"stop": [""]', b'"stop": 3'),
    *(b'"max_tokens": 0', b'"max_tokens": -5', b'"max_tokens": 1.5', b'"user": "\\udfff"'),
    *(b'"metadata": {"m1_session": "\\ud800"}', b'"stream": "yes"', b'"stream_options": 3'),
]


async def test_hostile_values_are_400_and_the_engine_lives(tiny: Any) -> None:
    for field in HOSTILE:
        body = b'{"model": "fake", "messages": [{"role": "user", "content": "x"}], %s}' % field
        for path in ("/v1/chat/completions", "/v1/completions"):
            answer = await post(
                tiny, body.replace(b'"messages"', b'"prompt": "a", "messages"'), path
            )
            # a text completion may be of no tokens, and reads logprobs as a number
            if path == "/v1/completions" and field == b'"max_tokens": 0':
                continue
            assert (field, path, answer.status_code) == (field, path, 400)
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert answer.headers["x-should-retry"] == "false"
    assert tiny.engine.stats().num_running == 0
    assert (await ask(tiny, max_tokens=2)).choices[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [1] * 10_000}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [1] * 10_000}]}, "messages[0].content"),
        ({"messages": HI, "stop_token_ids": ["x"] * 10_000}, "stop_token_ids[0]"),
        ({"messages": HI, "logit_bias": {str(i): "x" for i in range(10_000)}}, "logit_bias"),
        ({"messages": HI, "metadata": {str(i): i for i in range(10_000)}}, "metadata"),
        ({"prompt": [7] * 10_000 + ["a"]}, "prompt[10000]"),
        ({"prompt": [[7], *["a"] * 10_000]}, "prompt[1]"),
        ({"prompt": ["a"] + [7] * 10_000}, "prompt[1]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_of_many_wrong_items_the_first_is_told(fields: dict[str, Any], param: str) -> None:
    """Collecting an error for each of a body's millions would take minutes and all memory."""
    kind = CompletionRequest if "prompt" in fields else ChatRequest
    body = json.dumps({"model": "fake", **fields}).encode()
    with pytest.raises(RequestError) as caught:
        parse_body(kind, body)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
    assert len(caught.value.message) < 300
    with pytest.raises(ValidationError) as all_of_them:
        kind.model_validate_json(body)
    assert all_of_them.value.error_count() < 5


EXTREME: list[dict[str, Any]] = [
    {"temperature": 5e-324}, {"top_p": 5e-324}, {"min_p": 5e-324}, {"top_k": 10**30},
    {"temperature": 2, "presence_penalty": -2, "frequency_penalty": -2, "repetition_penalty": 0.1},
    {"repetition_penalty": 2, "logit_bias": {"5": -100, "6": 100}}, {"max_tokens": 10**30},
    {"temperature": 0.001, "repetition_penalty": 0.1, "logit_bias": {"5": 100}},
    {"seed": -(2**63)}, {"seed": 2**63 - 1}, {"temperature": 0, "top_p": 1e-3, "min_p": 1},
]  # fmt: skip


@pytest.mark.parametrize("more", EXTREME, ids=str)
async def test_the_ends_of_every_range_can_be_sampled(tiny: Any, more: dict[str, Any]) -> None:
    body = {"model": "fake", "messages": HI, "max_tokens": 4, "logprobs": True, **more}
    answer = await post(tiny, body)
    assert answer.status_code == 200
    entries = answer.json()["choices"][0]["logprobs"]["content"]
    assert all(math.isfinite(entry["logprob"]) for entry in entries)


async def test_overload_is_never_the_clients_fault(serve: Any) -> None:
    async with serve() as world:
        for failure in (OverloadedError("full", retry_after_s=2), EngineAwayError("gone")):
            world.engine.failure = failure
            for path, body in (
                ("/v1/chat/completions", {"model": "fake", "messages": HI}),
                ("/v1/completions", {"model": "fake", "prompt": "a"}),
            ):
                answer = await post(world, body, path)
                assert answer.status_code == 503
                assert int(answer.headers["retry-after"]) > 0
                assert "x-should-retry" not in answer.headers
                assert "maximum context length" not in answer.text


async def test_only_overflow_speaks_of_the_context(serve: Any) -> None:
    async with serve() as world:
        long: Any = [{"role": "user", "content": "x" * 4096}]
        with pytest.raises(openai.BadRequestError) as caught:
            await world.client.chat.completions.create(model="fake", messages=long)
        assert caught.value.code == "context_length_exceeded"
        words = caught.value.body["message"]  # type: ignore[index]
        assert words.startswith("This model's maximum context length is 4096 tokens")
        other = await post(world, {"model": "gpt", "messages": HI})
        assert "maximum context length" not in other.text


async def test_many_choices_do_not_hold_up_others(tiny: Any) -> None:
    many = asyncio.create_task(ask(tiny, n=64, max_tokens=30))
    assert len((await ask(tiny, max_tokens=1)).choices) == 1
    assert len((await many).choices) == 64
