"""From a request to the loss: tokens that were forced, or of a repetition's run, are never trained.

API, journal, sidecar, ledger, samples and the flat streams of the loss, all real; a scripted model.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import AsyncOpenAI

from m1serve.api import create_app
from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.chat.tokenizer import TAGS, ChatTokenizer
from m1serve.config import EngineSettings, Settings
from m1serve.engine.base import Engine
from m1serve.engine.local import LocalEngine
from m1serve.engine.script import ScriptedReply
from m1serve.engine.scripted import ScriptedEngine
from m1serve.engine.staging import Staged
from m1serve.model.checkpoint import load_model
from m1serve.model.tiny import tiny_model_dir
from m1serve.online_rl.forward import token_streams
from m1serve.online_rl.packing import Microbatch, Row
from m1serve.online_rl.samples import Sample, trajectory_samples
from m1serve.store import Store
from m1serve.store.journal import JournalWriter
from m1serve.store.records import TurnRecord
from m1serve.store.sidecar import Sidecar
from m1serve.types import StopCause, TokenFlag

ASK: Any = [{"role": "user", "content": "How many?"}]


@dataclass
class Loop:
    client: AsyncOpenAI
    store: Store
    journal: JournalWriter
    sidecar: Sidecar

    def kept(self, session_id: str) -> tuple[list[TurnRecord], list[Sample], int]:
        """The session's turns as the ledger has them, its samples, and the ledger's own count."""
        self.journal.flush()
        self.sidecar.run_once()
        rows = self.store.ledger.list_trajectories(session_id=session_id)
        views = self.store.ledger.trajectories([row.trajectory_id for row in rows])
        samples = [sample for view in views for sample in trajectory_samples(view, "g", -1.0)]
        return [t for v in views for t in v.turns], samples, sum(r.num_trainable for r in rows)


@asynccontextmanager
async def loop(tmp_path: Path, engine: Engine, tok: ChatTokenizer) -> AsyncIterator[Loop]:
    settings = Settings(home=tmp_path)
    journal = JournalWriter(settings.journal_dir)
    store = Store.open(settings.database)
    transport = httpx.ASGITransport(create_app(engine, journal, settings, tok))
    async with httpx.AsyncClient(transport=transport) as http:
        client = AsyncOpenAI(
            base_url="http://m1/v1", api_key="any", max_retries=0, http_client=http
        )
        yield Loop(client, store, journal, Sidecar(store, settings.journal_dir))
    await engine.close()
    journal.close()
    store.close()


def scripted(text: str, tok: ChatTokenizer) -> ScriptedEngine:
    reply = ScriptedReply(text=text)
    return ScriptedEngine(lambda _: reply, tokenizer=tok, weights_version="nano@0")


def sure_of_itself(tmp_path: Path) -> tuple[LocalEngine, ChatTokenizer]:
    """Random weights whose head shouts, so that nearly every draw has p > 0.99."""
    model_dir = tiny_model_dir(tmp_path / "model")
    tok, model = ChatTokenizer.load(model_dir), load_model(model_dir)
    with torch.no_grad():
        model.lm_head.weight.mul_(100_000.0)
        # their logits are 0, below the most likely token's: they are never said
        for ids in (slice(tok.eos_id, tok.eos_id + 1), slice(tok.vocab_size, None)):
            model.lm_head.weight[ids] = 0.0
    staged = Staged(
        model=model.eval().requires_grad_(False),
        weights_version="nano@0",
        phases_ms={},
        parity_mean=0.0,
        parity_max=0.0,
    )
    settings = EngineSettings(num_slots=2, max_model_len=3600)
    return LocalEngine(staged, settings=settings, tokenizer=tok), tok


async def ask(over: Loop, session_id: str, is_stream: bool, **body: Any) -> Any:
    """The last choice, or the last chunk's."""
    answer = await over.client.chat.completions.create(
        model="nano",
        messages=ASK,
        stream=is_stream,
        extra_body=body,
        extra_headers={"X-M1-Session-Id": session_id},
    )
    chunks = [chunk async for chunk in answer] if is_stream else [answer]
    await over.client.post(f"/sessions/{session_id}/end", cast_to=object)
    return chunks[-1].choices[0]


def in_the_loss(samples: list[Sample]) -> list[float]:
    """The sampler's logprobs of the tokens that the loss sees."""
    micro = Microbatch(rows=tuple(Row(sample=s, norm=1.0) for s in samples), prefix_length=0)
    return [float(p) for p in token_streams(micro, "cpu").sampler_logp_N]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("tags", [TAGS, ()], ids=["tags of one token", "tags spelled"])
async def test_the_tokens_that_close_a_think_block_are_kept_and_not_trained(
    tmp_path: Path, tags: tuple[str, ...], is_stream: bool
) -> None:
    tok = byte_tokenizer(tags=tags)
    engine = scripted("<think>one two three</think>\nSix.", tok)
    async with loop(tmp_path, engine, tok) as over:
        await ask(over, "s", is_stream, reasoning_budget=6)
        [turn], [sample], num_counted = over.kept("s")
    assert tok.decode(turn.completion_ids) == "<think>one tw</think>\nSix.<end_of_sentence>"
    forced = [i for i, f in zip(turn.completion_ids, turn.token_flags, strict=True) if f == 2]
    assert tok.decode(forced) == "</think>\n"
    start = len(turn.prompt_ids)
    assert sample.token_ids == (*turn.prompt_ids, *turn.completion_ids)
    assert sample.is_trained[:start] == (False,) * start
    is_sampled = tuple(flag == TokenFlag.SAMPLED for flag in turn.token_flags)
    assert sample.is_trained[start:] == is_sampled
    assert num_counted == sample.num_trained == sum(is_sampled)
    trained = [p for p, on in zip(turn.logprobs, is_sampled, strict=True) if on]
    assert in_the_loss([sample]) == pytest.approx(trained)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_run_of_a_repetition_is_kept_and_not_trained(
    tmp_path: Path, is_stream: bool
) -> None:
    tok = byte_tokenizer()
    engine = scripted("<think>one, two</think>\nSix and" + " " * 90, tok)
    async with loop(tmp_path, engine, tok) as over:
        await ask(over, "s", is_stream, repetition_stop_tokens=25, reasoning_budget=3)
        [turn], [sample], num_counted = over.kept("s")
    assert (turn.stop, turn.stop_detail) == (StopCause.REPETITION, "25")
    assert turn.finish_reason == "stop"
    # the first blank of the run follows a "d" and is not certain
    said = "<think>one</think>\nSix and" + " " * 26
    assert tok.decode(turn.completion_ids) == said
    start, num_forced = len(turn.prompt_ids), 2
    assert sample.is_trained[start:] == (
        *(True,) * 4,
        *(False,) * num_forced,
        *(True,) * len("Six and "),
        *(False,) * 25,
    )
    assert num_counted == sample.num_trained == len(in_the_loss([sample])) == 12


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_model_in_a_loop_is_stopped_as_the_paper_stops_it(
    tmp_path: Path, is_stream: bool
) -> None:
    """The local engine and no setting at all: 3,000 tokens with p > 0.99 and not one more."""
    engine, tok = sure_of_itself(tmp_path)
    async with loop(tmp_path, engine, tok) as over:
        choice = await ask(over, "s", is_stream)
        [turn], samples, num_counted = over.kept("s")
    assert (choice.finish_reason, choice.stop_cause) == ("stop", "repetition")
    assert (turn.stop, turn.stop_detail) == (StopCause.REPETITION, "3000")
    before, run = turn.logprobs[:-3000], turn.logprobs[-3000:]
    assert min(run) > math.log(0.99)
    assert before == () or before[-1] <= math.log(0.99)
    assert num_counted == sum(s.num_trained for s in samples) == len(before)
