"""Section G of docs/public-bugs.md: which weights said what, and that ids are the truth."""

import asyncio
import random
from typing import Any

import pytest

from m1serve.store.records import TurnRecord

USER: Any = {"role": "user", "content": "What is the status of order 4217?"}


async def say(world: Any, **more: Any) -> Any:
    return await world.client.chat.completions.create(
        model="fake",
        messages=[USER],
        logprobs=True,
        logit_bias={str(world.tok.eos_id): -100},
        **{"max_tokens": 24, "temperature": 0, **more},
    )


def logprobs(answer: Any) -> list[float]:
    return [entry.logprob for entry in answer.choices[0].logprobs.content]


async def test_after_an_update_answers_are_those_of_a_fresh_server(
    serve_local: Any, tiny_versions: Any
) -> None:
    """G1: InternLM/lmdeploy#4917; vllm-project/vllm#9744; NVIDIA-NeMo/RL#4018. G2: the caches are
    salted with the version, so that nobody has to reset them."""
    async with serve_local() as world:
        before = await say(world)
        assert (await world.engine.load(tiny_versions[1])).is_accepted
        updated = await say(world)
        again = await say(world)
    async with serve_local() as world:
        await world.engine.load(tiny_versions[1])
        fresh = await say(world)
    assert logprobs(updated) == pytest.approx(logprobs(fresh), abs=1e-4)
    assert logprobs(again) == pytest.approx(logprobs(fresh), abs=1e-4)
    assert logprobs(updated) != pytest.approx(logprobs(before), abs=1e-2)
    assert (before.system_fingerprint, updated.system_fingerprint) == ("fake@0", "fake@1")
    assert updated.usage.prompt_tokens_details.cached_tokens == 0


async def test_every_token_knows_its_weights_while_they_change(
    serve_local: Any, tiny_versions: Any
) -> None:
    """G4: vllm-project/vllm#54443, #48306, #49040. G5: meta-pytorch/torchforge#251;
    NVIDIA-NeMo/labs-molt#124: no request runs on a mixture."""
    async with serve_local() as world:
        alone = {}
        for version in tiny_versions:
            await world.engine.load(version)
            answer = await say(world, max_tokens=80)
            alone[version.weights_version] = answer.choices[0].message.content
        world.journal.clear()
        asking = []
        for version in (*tiny_versions, *tiny_versions):
            asking += [asyncio.create_task(say(world, max_tokens=80)) for _ in range(2)]
            await asyncio.sleep(0.02)
            assert (await world.engine.load(version)).is_accepted
        said = {answer.choices[0].message.content for answer in await asyncio.gather(*asking)}
        turns: list[TurnRecord] = world.turns
    assert len(set(alone.values())) == 2
    assert said <= set(alone.values())
    for turn in turns:
        assert sum(span.end - span.start for span in turn.version_spans) == len(turn.completion_ids)
        assert len({span.weights_version for span in turn.version_spans}) == 1


async def test_what_was_sampled_is_logged_id_by_id(serve: Any, ask: Any) -> None:
    """G7: huggingface/trl#5224; rllm-org/rllm#816, #272; modelscope/ms-swift#10012;
    stanford-cs336/assignment5-alignment#15. G11: jingyaogong/minimind#850: special tokens in the
    middle stay, though the text does not tell them from their names."""
    draw = random.Random(7)
    async with serve() as world:
        specials = [i for i in world.tok.control_ids.values() if i != world.tok.eos_id]
        for _ in range(8):
            # bytes that are no UTF-8, tags anywhere, names of tokens spelled out
            ids = [draw.choice([*range(256), *specials]) for _ in range(50)]
            ids += world.tok.encode_text("<think></tool_calls><begin_of_document>")
            world.engine.tok = Speaking(world.tok, [*ids, world.tok.eos_id])
            await ask(world, stream=draw.random() < 0.5)
            turn = world.turns[-1]
            request = world.engine.requests[-1]
            assert turn.completion_ids == (*ids, world.tok.eos_id)
            assert tuple(turn.prompt_ids) == request.prompt_ids
            assert len(turn.logprobs) == len(turn.token_flags) == len(turn.completion_ids)
            assert world.tok.encode_control(world.tok.decode(ids)) != ids


class Speaking:
    """A tokenizer whose reply is given in ids: the fake engine asks it for those of its text."""

    def __init__(self, tok: Any, ids: list[int]) -> None:
        self._tok = getattr(tok, "_tok", tok)
        self._ids = ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tok, name)

    def encode_control(self, text: str) -> list[int]:
        is_reply = text.endswith("<end_of_sentence>")
        return list(self._ids) if is_reply else list(self._tok.encode_control(text))
