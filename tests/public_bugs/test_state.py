"""Section F of docs/public-bugs.md: recurrent state that is nobody else's, exact and fp32."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from m1serve.model.checkpoint import load_model
from m1serve.model.tiny import tiny_model_dir

QUESTIONS = ("What is the status of order 4217?", "Cancel order 12, please.")


async def logprobs(world: Any, text: str, **more: Any) -> list[float]:
    answer = await world.client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=20,
        logprobs=True,
        logit_bias={str(world.tok.eos_id): -100},
        **more,
    )
    return [entry.logprob for entry in answer.choices[0].logprobs.content]


async def test_requests_do_not_see_each_other_in_any_order(serve_local: Any) -> None:
    """F1: PaddlePaddle/FastDeploy#6994: A alone, B, A again, and A beside B."""
    first, second = QUESTIONS
    async with serve_local() as world:
        alone = await logprobs(world, first)
        other = await logprobs(world, second)
        again = await logprobs(world, first)
        beside, _ = await asyncio.gather(logprobs(world, first), logprobs(world, second))
    async with serve_local() as world:
        assert await logprobs(world, second) == pytest.approx(other, abs=1e-4)
    assert again == pytest.approx(alone, abs=1e-4)
    assert beside == pytest.approx(alone, abs=1e-4)


async def test_a_cached_prefix_of_any_length_changes_nothing(serve_local: Any) -> None:
    """F3: vllm-project/vllm#43090. F9: LMCache/LMCache#2206. F6: hits are told in the usage."""
    system = {"role": "system", "content": "You are a helpful assistant. " * 3}
    create: Any
    hits = []
    for text in QUESTIONS:
        async with serve_local() as world:
            cold = await logprobs(world, text)
        async with serve_local() as world:
            create = world.client.chat.completions.create
            for warm in (QUESTIONS[1], QUESTIONS[0]):
                await create(
                    model="fake", messages=[system, {"role": "user", "content": warm}], max_tokens=3
                )
            answer = await create(
                model="fake", messages=[system, {"role": "user", "content": text}], max_tokens=3
            )
            hits.append(answer.usage.prompt_tokens_details.cached_tokens)
            assert await logprobs(world, text) == pytest.approx(cold, abs=1e-4)
    assert all(hit > 0 for hit in hits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_is_fp32_and_does_not_drift_over_a_long_decode(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """F10: MiniMax-AI/MiniMax-M1#26, vllm-project/vllm#19592; F7, token by token."""
    model = load_model(tiny_model_dir(tmp_path / "model", seed=3)).to(dtype)
    ids = torch.randint(0, 500, (1, 600), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model.logits(model.hidden(ids)[0])
        hidden, state = model.hidden(ids[:, :64])
        last = hidden
        for place in range(64, ids.shape[1]):
            last, state = model.hidden(ids[:, place : place + 1], state)
        stepped = model.logits(last)
    assert {tensor.dtype for tensor in state.lightning.values()} == {torch.float32}
    assert whole.dtype == stepped.dtype == torch.float32
    gap = float((whole[:, -1] - stepped[:, -1]).abs().max())
    assert gap < (1e-3 if dtype is torch.float32 else 0.2)
