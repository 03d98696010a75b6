"""MiniMax's own logits, out of the engine: in chunks, among others, from snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings
from m1serve.engine.local import LocalEngine
from m1serve.engine.staging import Staged
from m1serve.model.checkpoint import disk_views
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.tiny import tiny_config, tiny_tokenizer
from m1serve.types import Sampling

VOCAB_SIZE = 512
ALPHA = 3.5565588200778455
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def golden(m1_data: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(m1_data / "golden_tiny.pt", weights_only=True)
    return loaded


def golden_model(golden: dict[str, Any]) -> M1ForCausalLM:
    config = replace(
        tiny_config(VOCAB_SIZE),
        hidden_size=128,
        num_attention_heads=8,
        rope_theta=1e7,
        intermediate_size=96,
        layernorm_full_attention_alpha=ALPHA,
        layernorm_linear_attention_alpha=ALPHA,
        layernorm_mlp_alpha=ALPHA,
    )
    model = M1ForCausalLM(config).eval().requires_grad_(False)
    for name, view in disk_views(model).items():
        view.copy_(golden["sd"][name])
    return model


def golden_engine(
    versions: Any, tok: Any, settings: EngineSettings, *, golden: dict[str, Any], **changes: Any
) -> LocalEngine:
    """Knows as many tokens as the model, whatever they mean."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<filler {i}>" for i in range(VOCAB_SIZE - tokenizer.get_vocab_size())])
    staged = Staged(
        model=golden_model(golden),
        weights_version="golden@0",
        phases_ms={},
        parity_mean=0.0,
        parity_max=0.0,
    )
    chosen = EngineSettings(**{"num_slots": 4, "max_model_len": 640, **changes})
    return LocalEngine(staged, settings=chosen, tokenizer=ChatTokenizer(tokenizer.to_str()))


def expected(golden: dict[str, Any], num_tokens: int) -> list[float]:
    """logprobs of ids[1:num_tokens] in the first row."""
    logprob_TV = torch.log_softmax(golden["full"][0, : num_tokens - 1].double(), -1)
    next_T1 = golden["ids"][0, 1:num_tokens, None]
    values: list[float] = logprob_TV.gather(1, next_T1)[:, 0].tolist()
    return values


def prompt(golden: dict[str, Any], num_tokens: int) -> tuple[int, ...]:
    return tuple(golden["ids"][0, :num_tokens].tolist())


def largest_gap(got: Sequence[float], wanted: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(got, wanted, strict=True))


async def read(rig: Any, ids: tuple[int, ...], **fields: Any) -> Any:
    """Its prompt logprobs, and a few tokens behind them."""
    return await rig.say(
        prompt_ids=ids, prompt_logprobs=True, sampling=Sampling(seed=1), max_tokens=4, **fields
    )


@pytest.mark.parametrize("chunk", [16, 33, 100, 256, 4096])
async def test_whatever_the_chunks(make_rig: Any, golden: dict[str, Any], chunk: int) -> None:
    rig = make_rig(golden_engine, golden=golden, prefill_chunk_tokens=chunk)
    for num_tokens in (2, 63, 64, 65, 520, 560):
        said = await read(rig, prompt(golden, num_tokens))
        got = said.started.prompt_logprobs
        assert largest_gap(got, expected(golden, num_tokens)) < TOLERANCE


async def test_among_others_and_behind_snapshots(make_rig: Any, golden: dict[str, Any]) -> None:
    rig = make_rig(golden_engine, golden=golden, prefill_chunk_tokens=100)
    talk = [asyncio.create_task(rig.say(max_tokens=60, n=2)) for _ in range(2)]
    said = await asyncio.gather(*(read(rig, prompt(golden, n)) for n in (560, 300, 561 - 500)))
    for one, num_tokens in zip(said, (560, 300, 61), strict=True):
        got = one.started.prompt_logprobs
        assert largest_gap(got, expected(golden, num_tokens)) < TOLERANCE
    await asyncio.gather(*talk)


@pytest.mark.parametrize("num_decoded", [1, 40])
async def test_token_by_token(make_rig: Any, golden: dict[str, Any], num_decoded: int) -> None:
    """What it decodes is scored by MiniMax's logits: the grammarless way to force a token."""
    rig = make_rig(golden_engine, golden=golden)
    start = 560 - num_decoded
    ids, wanted = list(prompt(golden, start)), expected(golden, 560)
    got: list[float] = []
    for place in range(start, 560):
        token = int(golden["ids"][0, place])
        forced = Sampling(seed=1, logit_bias=((token, 1000.0),))
        said = await rig.say(prompt_ids=tuple(ids), sampling=forced, max_tokens=1)
        assert said.ids() == (token,)
        got += said.logprobs()
        ids.append(token)
    assert largest_gap(got, wanted[start - 1 :]) < TOLERANCE
    # all but the last token of each prompt was in a snapshot
    assert rig.engine.stats().prefix_hits == num_decoded - 1
