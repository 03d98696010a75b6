"""MiniMax's own log-probabilities come out of the engine, whatever it does at the same time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from torch import Tensor

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings
from m1serve.engine.cache_memory import CPU_PAGE_TOKENS
from m1serve.engine.local import LocalEngine
from m1serve.engine.memory_plan import memory_for
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.tiny import tiny_tokenizer
from m1serve.model.weights import write_version
from m1serve.types import Delta, GenerateRequest, Limits, Sampling, Started, VersionRef

TOLERANCE = 4e-5
"""Of a log-probability: twice that of the logits."""
CUTS = (1, 33, 150, 256, 257, 400, 519)


@dataclass(frozen=True, kw_only=True)
class Said:
    prompt: tuple[int, ...]
    started: Started
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


async def say(
    engine: LocalEngine, name: str, prompt: list[int], *, max_tokens: int = 8, **fields: Any
) -> Said:
    """Greedy unless told otherwise."""
    fields.setdefault("sampling", Sampling(temperature=0.0))
    request = GenerateRequest(
        id=name,
        prompt_ids=tuple(prompt),
        limits=Limits(max_tokens=max_tokens),
        min_delta_interval_s=math.inf,
        **fields,
    )
    started: Started | None = None
    deltas: list[Delta] = []
    async for item in engine.generate(request):
        if isinstance(item, Started):
            started = item
        else:
            deltas.append(item)
    assert started is not None
    return Said(
        prompt=request.prompt_ids,
        started=started,
        token_ids=tuple(i for delta in deltas for i in delta.token_ids),
        logprobs=tuple(p for delta in deltas for p in delta.logprobs),
    )


StartEngine = Callable[..., LocalEngine]


@pytest_asyncio.fixture
async def start(
    golden_model: Callable[..., M1ForCausalLM], tmp_path: Path
) -> AsyncIterator[StartEngine]:
    """Starts engines with fewer slots than requests and chunks that divide nothing."""
    file = tmp_path / "tokenizer.json"
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<filler {i}>" for i in range(512 - tokenizer.get_vocab_size())])
    tokenizer.save(str(file))
    path = write_version(
        tmp_path / "weights",
        weights_version="golden@0",
        model=golden_model(),
        tokenizer_file=file,
        parent=None,
        run_id=None,
        golden_prompts=[list(range(10, 30))],
    )
    engines: list[LocalEngine] = []

    def start(**changes: Any) -> LocalEngine:
        settings = EngineSettings(num_slots=4, max_model_len=640, prefill_chunk_tokens=48)
        engine = LocalEngine.start(
            VersionRef(weights_version="golden@0", path=str(path)),
            settings=settings.model_copy(update=changes),
            tokenizer=ChatTokenizer.load(path / "serving"),
        )
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        await engine.close()


@torch.no_grad()
def sampled_error(model: M1ForCausalLM, said: Said) -> float:
    """Against one forward over prompt and answer."""
    ids_T = torch.tensor([*said.prompt, *said.token_ids])
    logp_TV = torch.log_softmax(model(ids_T[None])[0], -1)
    wanted_T = logp_TV[:-1].gather(-1, ids_T[1:, None])[-len(said.token_ids) :, 0]
    return float((torch.tensor(said.logprobs) - wanted_T).abs().max())


def token_logprobs(logits_TV: Tensor, ids_T: Tensor) -> Tensor:
    """[T - 1]"""
    return torch.log_softmax(logits_TV, -1)[:-1].gather(-1, ids_T[1:, None])[:, 0]


async def test_prompts_and_answers_have_minimaxs_logprobs(
    start: StartEngine, golden: dict[str, Any], golden_model: Callable[..., M1ForCausalLM]
) -> None:
    rows = [(golden["ids"][0], golden["full"][0]), (golden["ids"][1, 37:], golden["solo"][0])]
    model, engine = golden_model(), start()
    for turn in range(2):
        asked = [
            say(engine, f"p{turn}{i}", ids_T.tolist(), prompt_logprobs=True)
            for i, (ids_T, _) in enumerate(rows)
        ] + [say(engine, f"c{turn}{cut}", rows[0][0][:cut].tolist()) for cut in CUTS]
        said = await asyncio.gather(*asked)
        for (ids_T, logits_TV), scored in zip(rows, said, strict=False):
            got_T = torch.tensor(scored.started.prompt_logprobs)
            assert float((got_T - token_logprobs(logits_TV, ids_T)).abs().max()) < TOLERANCE
        for cut, answer in zip(CUTS, said[2:], strict=True):
            wanted_V = torch.log_softmax(golden["full"][0, cut - 1], -1)
            assert answer.token_ids[0] == int(wanted_V.argmax())
            assert abs(answer.logprobs[0] - float(wanted_V.max())) < TOLERANCE
        assert max(sampled_error(model, answer) for answer in said) < TOLERANCE
    # the second turn reads from snapshots of the first
    assert max(answer.started.cached_tokens for answer in said[2:]) >= 256


@pytest.mark.parametrize("chunk", [16, 33, 100, 256, 4096])
async def test_whatever_the_chunks(start: StartEngine, golden: dict[str, Any], chunk: int) -> None:
    engine, ids_T = start(prefill_chunk_tokens=chunk), golden["ids"][0]
    for num_tokens in (2, 63, 64, 65, 520, 560):
        ids = ids_T[:num_tokens].tolist()
        said = await say(engine, f"c{num_tokens}", ids, prompt_logprobs=True)
        got_T = torch.tensor(said.started.prompt_logprobs)
        wanted_T = token_logprobs(golden["full"][0, :num_tokens], ids_T[:num_tokens])
        assert float((got_T - wanted_T).abs().max()) < TOLERANCE / 2


@pytest.mark.parametrize("num_decoded", [1, 40])
async def test_token_by_token_from_snapshots(
    start: StartEngine, golden: dict[str, Any], num_decoded: int
) -> None:
    """A bias makes it say MiniMax's next token; its log-probability is the model's own."""
    engine, ids = start(), golden["ids"][0].tolist()
    first = 560 - num_decoded
    got: list[float] = []
    for place in range(first, 560):
        bent = Sampling(seed=1, logit_bias=((ids[place], 1000.0),))
        said = await say(engine, f"t{place}", ids[:place], max_tokens=1, sampling=bent)
        assert said.token_ids == (ids[place],)
        got += said.logprobs
    wanted_T = token_logprobs(golden["full"][0], golden["ids"][0])[first - 1 :]
    assert float((torch.tensor(got) - wanted_T).abs().max()) < TOLERANCE / 2
    # all but the last token of each prompt was in a snapshot
    assert engine.stats().prefix_hits == num_decoded - 1


async def test_who_gave_way_and_read_again_has_minimaxs_logprobs(
    start: StartEngine, golden: dict[str, Any], golden_model: Callable[..., M1ForCausalLM]
) -> None:
    """Pages for hardly more than one of four sequences: the last is preempted and recomputed."""
    num_tokens = 640 + 4 * CPU_PAGE_TOKENS
    memory_bytes = memory_for(golden_model().config, num_slots=4, num_tokens=num_tokens)
    engine = start(snapshot_bytes=0, memory_bytes=memory_bytes)
    ids = golden["ids"][0].tolist()
    cuts = (90, 150, 210, 250)
    said = await asyncio.gather(
        *(say(engine, f"r{cut}", ids[:cut], max_tokens=120) for cut in cuts)
    )
    assert engine.stats().num_preemptions > 0
    for cut, answer in zip(cuts, said, strict=True):
        wanted_V = torch.log_softmax(golden["full"][0, cut - 1], -1)
        assert abs(answer.logprobs[0] - float(wanted_V.max())) < TOLERANCE
        assert len(answer.token_ids) == 120
        assert sampled_error(golden_model(), answer) < TOLERANCE
