"""Thousands of tokens in one answer, over HTTP and into the ledger, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NUM_TOKENS = 4096


@pytest.fixture(scope="module")
def product(start_up: Callable[..., Any]) -> Any:
    flags = ("engine.max_model_len=8192", "serve.keep_alive_s=0.5", "engine.snapshot_bytes=0")
    with start_up(*(part for flag in flags for part in ("--set", flag))) as running:
        yield running


def eos_id(product: Any) -> int:
    config = json.loads((product.home.parent / "model" / "config.json").read_text())
    return int(config["eos_token_id"])


def asked(product: Any, **fields: Any) -> dict[str, Any]:
    """Never ends by itself, whatever it says over and over."""
    return {
        "model": "nano",
        "messages": [{"role": "user", "content": "Go on."}],
        "max_tokens": NUM_TOKENS,
        "logit_bias": {str(eos_id(product)): -100},
        "repetition_stop_tokens": 0,
        **fields,
    }


def recorded_tokens(product: Any, completion_id: str) -> int:
    """Of the turn in the ledger, once the sidecar has it."""
    request_id = completion_id.partition("-")[2]
    find = "SELECT num_completion FROM turns WHERE request_id = ?"
    product.wait_until(lambda: product.rows(find, request_id), 60, "the turn in the ledger")
    return int(product.one(find, request_id))


def test_a_stream_brings_every_token(product: Any) -> None:
    client = openai.OpenAI(base_url=f"{product.url}/v1", api_key="none")
    fields = asked(product, stream=True, stream_options={"include_usage": True})
    extra = {
        "return_token_ids": True,
        "repetition_stop_tokens": fields.pop("repetition_stop_tokens"),
    }
    num_ids, chunks = 0, []
    for chunk in client.chat.completions.create(**fields, extra_body=extra):
        chunks.append(chunk)
        for choice in chunk.choices:
            num_ids += len((choice.model_extra or {}).get("token_ids") or [])
    assert num_ids == NUM_TOKENS
    assert chunks[-1].usage.completion_tokens == NUM_TOKENS
    assert chunks[-2].choices[0].finish_reason == "length"
    assert recorded_tokens(product, chunks[0].id) == NUM_TOKENS


def test_a_whole_body_is_kept_alive_and_complete(product: Any) -> None:
    url = f"{product.url}/v1/chat/completions"
    pieces: list[bytes] = []
    with httpx.stream("POST", url, json=asked(product), timeout=120) as answer:
        pieces += answer.iter_raw()
    whole = b"".join(pieces)
    # spaces came while it was silent; JSON does not mind them
    assert len(pieces) > 2
    assert whole.startswith(b" ")
    body = json.loads(whole)
    assert body["usage"]["completion_tokens"] == NUM_TOKENS
    assert body["choices"][0]["finish_reason"] == "length"
    assert recorded_tokens(product, body["id"]) == NUM_TOKENS
