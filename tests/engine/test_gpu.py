"""The local engine on a GPU says what it says on the CPU."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings
from m1serve.engine.local import LocalEngine
from m1serve.types import Sampling, VersionRef

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

Versions = tuple[VersionRef, VersionRef]


def on(
    versions: Versions, tok: ChatTokenizer, settings: EngineSettings, *, device: str, dtype: Any
) -> LocalEngine:
    return LocalEngine.start(
        versions[0], settings=settings, tokenizer=tok, device=device, dtype=dtype
    )


async def test_fp32_on_a_gpu_agrees_with_the_cpu(make_rig: Any) -> None:
    cpu = make_rig(on, device="cpu", dtype=torch.float32)
    gpu = make_rig(on, device="cuda", dtype=torch.float32)
    for sampling in (
        Sampling(seed=3),
        Sampling(temperature=0.0),
        Sampling(seed=1, temperature=0.7, top_p=0.9, top_k=40, presence_penalty=0.3),
    ):
        said = await gpu.say(sampling=sampling, max_tokens=24, n=3, top_logprobs=2)
        for choice in range(3):
            scored = await cpu.engine.score((*cpu.prompt(), *said.ids(choice)))
            num_said = len(said.ids(choice))
            expected = pytest.approx(scored.logprobs[-num_said:], abs=1e-3)
            assert said.logprobs(choice) == expected


async def test_a_gpu_engine_batches_snapshots_and_swaps(make_rig: Any, versions: Versions) -> None:
    rig = make_rig(on, device="cuda", dtype=torch.bfloat16)
    many = [rig.say(sampling=Sampling(seed=i), max_tokens=20 + i, n=2) for i in range(12)]
    alone = await rig.say(sampling=Sampling(seed=5), max_tokens=25)
    said = await asyncio.gather(*many)
    assert len(said[5].ids()) == len(alone.ids())
    longer = (*rig.prompt(), *rig.prompt("Really?"))
    assert (await rig.say(prompt_ids=longer)).started.cached_tokens == len(rig.prompt())
    report = await rig.engine.load(versions[1])
    assert report.is_accepted, report.reason
    assert set((await rig.say()).versions()) == {"tiny@1"}
