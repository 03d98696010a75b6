"""Refusals: the right status, OpenAI's shape, and words that say what to do."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from m1serve.errors import EngineAwayError, EngineError, OverloadedError, RequestError

HI: Any = [{"role": "user", "content": "Hi"}]


async def post(world: Any, body: object, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(verify=False) as http:
        return await http.post(f"{world.url}/v1/chat/completions", content=content, headers=headers)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "temperature too high": ({"temperature": 3}, "temperature"),
    "temperature as text": ({"temperature": "1"}, "temperature"),
    "temperature as bool": ({"temperature": True}, "temperature"),
    "negative top_p": ({"top_p": -1}, "top_p"),
    "huge n": ({"n": 100_000}, "n"),
    "n zero": ({"n": 0}, "n"),
    "max_tokens zero": ({"max_tokens": 0}, "max_tokens"),
    "bias of an unknown token": ({"logit_bias": {"999999": 5}}, "logit_bias"),
    "bias of no token": ({"logit_bias": {"x": 5}}, "logit_bias"),
    "bias too strong": ({"logit_bias": {"5": 101}}, "logit_bias"),
    "unknown stop token": ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    "negative stop token": ({"stop_token_ids": [-1]}, "stop_token_ids"),
    "five stop strings": ({"stop": list("abcde")}, "stop"),
    "an empty stop string": ({"stop": ""}, "stop"),
    "21 top logprobs": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "negative top logprobs": ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    "top logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "forced tools": ({"tool_choice": "required"}, "tool_choice"),
    "json mode": ({"response_format": {"type": "json_object"}}, "response_format"),
    "old functions": ({"functions": [{"name": "f"}]}, "functions"),
    "audio": ({"modalities": ["text", "audio"]}, "modalities"),
    "a penalty that divides by nothing": ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    "no messages": ({"messages": []}, "messages"),
    "an unknown role": ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
    ),
    "a content number": ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    "arguments as an object": (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    "a tool without a name": ({"tools": [{"type": "function"}]}, "tools[0]"),
    "a tool of another type": ({"tools": [{"type": "web", "name": "x"}]}, "tools[0]"),
    "metadata with numbers": ({"metadata": {"a": 1}}, "metadata.a"),
    "a bad session": ({"metadata": {"m1_session": "a b"}}, "metadata.m1_session"),
    "an overlong prompt": ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
}


@pytest.fixture
async def world(serve: Any) -> Any:
    async with serve() as world:
        yield world


async def test_bad_fields_are_refused_by_name_and_the_server_goes_on(world: Any) -> None:
    for name, (field, param) in REFUSED.items():
        answer = await post(world, {"model": "fake", "messages": HI, **field})
        error = answer.json()["error"]
        assert (name, answer.status_code, error["param"]) == (name, 400, param)
        assert error["type"] == "invalid_request_error"
        assert param.split(".")[0].split("[")[0] in error["message"] or error["code"]
        assert answer.headers["x-should-retry"] == "false"
    assert (await post(world, {"model": "fake", "messages": HI})).status_code == 200


NO_REQUESTS = [
    *(b"", b"{", b"[]", b"\xff", b'{"model": "fake"}', b'"x"', b"null", b"[" * 100_000),
    b'{"model": "fake", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "fake", "temperature": NaN, "messages": [{"role": "user"}]}',
    b'{"model": "fake", "temperature": 1e999, "messages": [{"role": "user"}]}',
]


@pytest.mark.parametrize("body", NO_REQUESTS, ids=lambda body: repr(body[:20]))
async def test_a_body_that_is_no_request_is_refused(world: Any, body: bytes) -> None:
    answer = await post(world, body)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_fields_openai_has_are_ignored(world: Any) -> None:
    more = {"service_tier": "auto", "reasoning_effort": "low", "user": "u", "verbosity": "low"}
    more |= {"stream_options": None, "prompt_cache_key": "k", "modalities": ["text"]}
    more |= {"chat_template_kwargs": {"a": 1}, "ignore_eos": True, "nobody_knows": [1]}
    answer = await post(world, {"model": "fake", "messages": HI, **more})
    assert answer.status_code == 200


async def test_an_unknown_model_is_a_404_that_names_the_served(world: Any) -> None:
    with pytest.raises(openai.NotFoundError, match=r"fake, m1/alias") as caught:
        await world.client.chat.completions.create(model="gpt", messages=HI)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


async def test_overflow_has_openais_code_and_words(world: Any) -> None:
    long: Any = [{"role": "user", "content": "x" * 4096}]
    with pytest.raises(
        openai.BadRequestError, match="This model's maximum context length is 4096 tokens"
    ) as caught:
        await world.client.chat.completions.create(model="fake", messages=long)
    assert caught.value.code == "context_length_exceeded"


async def test_unknown_routes_and_methods_have_openais_shape(world: Any) -> None:
    async with httpx.AsyncClient(verify=False) as http:
        missing = await http.post(f"{world.url}/v1/embeddings")
        wrong = await http.get(f"{world.url}/v1/chat/completions")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert missing.json()["error"]["code"] == "not_found"
    assert "/v1/chat/completions" in missing.json()["error"]["message"]
    assert "/v1/sessions/{session_id}/end" in missing.json()["error"]["message"]
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    assert "x-request-id" in missing.headers


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_overloaded_engine_is_a_503_to_retry(world: Any, is_stream: bool) -> None:
    world.engine.failure = OverloadedError("the queue is full", retry_after_s=3)
    body = {"model": "fake", "messages": HI, "stream": is_stream}
    answer = await post(world, body)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "3"
    assert "x-should-retry" not in answer.headers
    assert answer.json()["error"]["code"] == "overloaded"


async def test_what_the_engine_refuses_is_the_clients_error(world: Any) -> None:
    world.engine.failure = RequestError("no grammar here", param="grammar")
    answer = await post(world, {"model": "fake", "messages": HI, "stream": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "grammar")


@pytest.mark.parametrize("failure", [EngineError("it broke"), ZeroDivisionError("secret")])
async def test_a_failing_engine_is_a_500_not_to_be_retried(world: Any, failure: Exception) -> None:
    world.engine.failure = failure
    answer = await post(world, {"model": "fake", "messages": HI})
    assert answer.status_code == 500
    assert answer.headers["x-should-retry"] == "false"
    assert "secret" not in answer.text
    assert world.turns == []


async def test_a_failure_inside_a_stream_is_an_error_event(world: Any) -> None:
    world.engine.replies, world.engine.fails_after = ["Hello there, this breaks."], 6
    chunks = await world.client.chat.completions.create(model="fake", messages=HI, stream=True)
    seen: list[Any] = []

    async def read() -> None:
        async for chunk in chunks:
            seen.append(chunk)

    with pytest.raises(openai.APIError, match="failed while generating: a detail"):
        await read()
    assert all(chunk.choices[0].finish_reason is None for chunk in seen)
    [turn] = world.turns
    assert (turn.stop, turn.finish_reason, turn.was_delivered) == ("error", "error", False)
    assert len(turn.completion_ids) == len(turn.logprobs) == 6


async def test_a_failure_of_a_whole_answer_is_a_500(world: Any) -> None:
    world.engine.replies, world.engine.fails_after = ["Hello there"], 6
    answer = await post(world, {"model": "fake", "messages": HI})
    assert answer.status_code == 500
    assert "a detail" in answer.json()["error"]["message"]


async def test_choices_cut_by_anothers_failure_do_not_blame_the_client(world: Any) -> None:
    world.engine.replies, world.engine.fails_after = ["Hello there", "never said"], 6
    await post(world, {"model": "fake", "messages": HI, "n": 2})
    failed, cut = world.turns
    assert (failed.stop, failed.stop_detail) == ("error", "a detail")
    assert (cut.stop, cut.stop_detail) == ("abort", "the request ended before this choice did")


async def test_a_replica_that_is_away_is_a_503_to_retry(world: Any) -> None:
    world.engine.failure = EngineAwayError("no replica can answer")
    answer = await post(world, {"model": "fake", "messages": HI})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_away")
    assert int(answer.headers["retry-after"]) > 0
    assert "x-should-retry" not in answer.headers


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_dead_journal_serves_only_what_is_not_recorded(world: Any, is_stream: bool) -> None:
    world.journal.is_alive = False
    body = {"model": "fake", "messages": HI, "stream": is_stream}
    answer = await post(world, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_error")
    assert "restart the server" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert int(answer.headers["retry-after"]) > 0
    assert world.engine.requests == []
    async with httpx.AsyncClient(verify=False) as http:
        off = {"x-m1-mode": "off"}
        url = f"{world.url}/v1/chat/completions"
        assert (await http.post(url, json=body, headers=off)).status_code == 200
        assert (await http.post(f"{world.url}/v1/sessions/s/end")).status_code == 503
        health = await http.get(f"{world.url}/health")
    assert (health.status_code, health.json()["status"]) == (503, "dead")


async def test_an_answer_whose_turn_died_with_the_journal_is_not_given(world: Any) -> None:
    def die(_: Any) -> None:
        world.journal.is_alive = False

    world.journal.when_written = die
    answer = await post(world, {"model": "fake", "messages": HI})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_error")


async def test_a_stream_says_that_the_journal_died_under_it(world: Any, eventually: Any) -> None:
    world.engine.delay_s, world.engine.replies = 0.05, ["Hello there"]
    body = {"model": "fake", "messages": HI, "stream": True}
    asking = asyncio.create_task(post(world, body))
    await eventually(lambda: world.engine.sent)
    world.journal.is_alive = False
    answer = await asking
    assert answer.status_code == 200
    last = json.loads(answer.text.strip().rpartition("data: ")[2])
    assert last["error"]["code"] == "store_error"
    assert '"finish_reason":"stop"' not in answer.text.replace(" ", "")


async def test_what_nobody_foresaw_is_a_500_with_its_id(world: Any) -> None:
    world.journal.append = None
    async with httpx.AsyncClient(verify=False) as http:
        answer = await http.post(f"{world.url}/v1/sessions/s/end")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["x-request-id"]


async def test_an_abort_by_the_server_may_be_sent_again(world: Any, eventually: Any) -> None:
    world.engine.replies, world.engine.delay_s = ["Hello there"], 0.01
    asking = asyncio.create_task(post(world, {"model": "fake", "messages": HI}))
    await eventually(lambda: world.engine.running)
    await world.engine.abort(next(iter(world.engine.running)))
    assert (await asking).status_code == 503
