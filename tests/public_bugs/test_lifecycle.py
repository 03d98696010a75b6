"""Section E of docs/public-bugs.md: clients that leave, and what stays as it was."""

import asyncio
from typing import Any

import httpx
import pytest

USER: Any = {"role": "user", "content": "u"}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_a_client_that_hangs_up_frees_the_engine_in_either_mode(
    serve: Any, ask: Any, eventually: Any, is_stream: bool, path: str
) -> None:
    """E1: ROCm/ATOM#1441, #1562; xorbitsai/inference#5549. E7: InternLM/lmdeploy#548."""
    question: dict[str, Any] = {"messages": [USER]} if path.startswith("chat") else {"prompt": "u"}
    async with serve("word " * 400) as world:
        world.engine.delay_s = 0.005
        async with httpx.AsyncClient(verify=False) as http:
            body = {"model": "fake", "stream": is_stream, "max_tokens": 2000, **question}
            asking = asyncio.create_task(http.post(f"{world.url}/v1/{path}", json=body))
            await eventually(lambda: world.engine.running)
            asking.cancel()
        await eventually(lambda: not world.engine.running, within_s=1.0)
        world.engine.delay_s = 0.0
        assert (await ask(world, max_tokens=9)).finish == "length"


async def test_those_beside_an_aborted_request_say_what_they_would_have_said(
    serve_local: Any, eventually: Any
) -> None:
    """E5: torch-spyre/sendnn-inference#492."""
    async with serve_local() as world, httpx.AsyncClient(verify=False) as http:

        async def say(seed: int) -> str:
            body = {
                "model": "fake",
                "messages": [USER],
                "seed": seed,
                "max_tokens": 60,
                "logit_bias": {str(world.tok.eos_id): -100},
            }
            answer = await http.post(f"{world.url}/v1/chat/completions", json=body)
            return str(answer.json()["choices"][0]["message"]["content"])

        alone = [await say(seed) for seed in range(4)]
        doomed = [asyncio.create_task(say(seed)) for seed in range(10, 14)]
        staying = [asyncio.create_task(say(seed)) for seed in range(4)]
        await eventually(lambda: world.engine.stats().num_running >= 6)
        for task in doomed:
            task.cancel()
        assert await asyncio.gather(*staying) == alone
        await eventually(lambda: world.engine.stats().num_running == 0)
