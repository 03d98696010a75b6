"""Requests of the shapes that TAU-bench, tau2-bench and Agentless send, against our server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from m1serve.api import create_app
from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.clients.harness.play import Call, call_text, script_text
from m1serve.config import Settings
from m1serve.engine.scripted import ScriptedEngine
from m1serve.store.journal import JournalWriter

CALL = Call(name="get_order", arguments={"order_id": "#W1"})
LINES = [
    {"when": "Find the order", "turn": 0, "text": call_text([CALL], thought="Look it up.")},
    {"when": "Find the order", "turn": 1, "text": "It is pending."},
    {"when": "My order, please", "turn": 1, "text": call_text([CALL, CALL])},
    {"when": "which files", "text": "```\na.py\n```", "more_texts": ["```\nb.py\n```"]},
    {"text": "Hello."},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_order",
        "description": "An order.",
        "parameters": {
            "type": "object",
            "properties": {"order_id": {"type": "string"}},
            "required": ["order_id"],
        },
    },
}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    file = tmp_path / "script.jsonl"
    file.write_text(script_text(LINES))
    raw = {"kind": "scripted", "script": str(file), "max_model_len": 16384}
    model = {"aliases": ["gpt-4o-2024-05-13"]}
    settings = Settings(home=tmp_path, engine=raw, model=model)  # type: ignore[arg-type]
    tok = byte_tokenizer()
    engine = ScriptedEngine(file, tokenizer=tok, settings=settings.engine)
    journal = JournalWriter(settings.journal_dir)
    app = create_app(engine, journal, settings, tok)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server/v1") as client:
        yield client
    await engine.close()
    journal.close()


async def ask(client: httpx.AsyncClient, **body: object) -> dict[str, object]:
    answer = await client.post("/chat/completions", json={"model": "nano", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_tau_replays_its_turn_without_content_and_with_extra_keys(
    client: httpx.AsyncClient,
) -> None:
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "# Retail policy\n"},
        {"role": "user", "content": "Find the order."},
    ]
    told = await ask(client, messages=messages, tools=[TOOL], temperature=0.0)
    message = told["choices"][0]["message"]  # type: ignore[index]
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == CALL.arguments
    replayed = {
        "role": "assistant",
        "tool_calls": [{"function": call["function"], "id": call["id"], "type": "function"}],
        "function_call": None,
        "reasoning_content": message["reasoning_content"],
        "provider_specific_fields": {"refusal": None},
    }
    result = {"role": "tool", "tool_call_id": call["id"], "name": "get_order", "content": "{}"}
    told = await ask(client, messages=[*messages, replayed, result], tools=[TOOL], temperature=0.0)
    assert told["choices"][0]["message"]["content"] == "It is pending."  # type: ignore[index]


async def test_tau_asks_its_user_with_model_and_messages_alone(client: httpx.AsyncClient) -> None:
    told = await ask(
        client,
        messages=[
            {"role": "system", "content": "You are a user interacting with an agent."},
            {"role": "user", "content": "Hi! How can I help you today?"},
        ],
    )
    assert told["choices"][0]["message"]["content"] == "Hello."  # type: ignore[index]


async def test_tau2_greets_before_the_user_speaks_and_names_its_calls_twice(
    client: httpx.AsyncClient,
) -> None:
    fields = {"tools": [TOOL], "tool_choice": "auto", "temperature": 0.0, "seed": 626729}
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "<policy>\n</policy>"},
        {"role": "assistant", "content": "Hi! How can I help you today?", "tool_calls": None},
        {"role": "user", "content": "My order, please."},
    ]
    told = await ask(client, messages=messages, **fields)
    choice = told["choices"][0]  # type: ignore[index]
    calls = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["role"] == "assistant"
    assert len({call["id"] for call in calls}) == 2
    replayed = [{**call, "name": call["function"]["name"]} for call in calls]
    results = [{"role": "tool", "content": "{}", "tool_call_id": call["id"]} for call in calls]
    turn = {"role": "assistant", "content": None, "tool_calls": replayed}
    told = await ask(client, messages=[*messages, turn, *results], **fields)
    assert told["choices"][0]["message"]["content"] == "Hello."  # type: ignore[index]


@pytest.mark.parametrize(("n", "temperature"), [(1, 0), (4, 0.8), (9, 0.8)])
async def test_agentless_gets_all_its_samples_and_their_usage(
    client: httpx.AsyncClient, n: int, temperature: float
) -> None:
    told = await ask(
        client,
        model="gpt-4o-2024-05-13",
        max_tokens=300,
        temperature=temperature,
        n=n,
        messages=[
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "Say which files."},
        ],
    )
    texts = [choice["message"]["content"] for choice in told["choices"]]  # type: ignore[attr-defined]
    assert texts == ["```\na.py\n```", "```\nb.py\n```"] * (n // 2) + ["```\na.py\n```"] * (n % 2)
    usage = told["usage"]
    assert isinstance(usage, dict)
    # bytes of the text and the end of the sentence, summed over the samples
    assert usage["completion_tokens"] == n * (len("```\na.py\n```") + 1)
    assert usage["prompt_tokens"] > 0
