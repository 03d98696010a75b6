"""What every engine owes a request with a grammar."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from m1serve.chat.grammar import CallableTool, after_tag_grammar, json_grammar
from m1serve.errors import RequestError
from m1serve.types import Grammar, GrammarStart, Limits, Sampling, StopCause, TokenFlag

StartRig = Callable[..., Awaitable[Any]]

ORDER = {
    "type": "object",
    "properties": {"order": {"type": "integer", "minimum": 0, "maximum": 99999}},
    "required": ["order"],
    "additionalProperties": False,
}
GRAMMAR = Grammar(text=json_grammar(ORDER))
SAMPLED, FORCED = TokenFlag.SAMPLED.value, TokenFlag.FORCED.value
MASKED = (TokenFlag.SAMPLED | TokenFlag.MASKED).value


def answer(text: str) -> Any:
    return json.loads(text.rpartition("</think>")[2].removesuffix("<end_of_sentence>"))


async def test_a_reply_keeps_its_grammar_and_says_so(start: StartRig) -> None:
    rig = await start(max_model_len=1024)
    said = await rig.say(max_tokens=400, grammar=GRAMMAR, sampling=Sampling(seed=3), n=3)
    for choice in range(3):
        value = answer(rig.tok.decode(said.ids(choice)))
        assert list(value) == ["order"]
        assert isinstance(value["order"], int)
        assert said.stop(choice) is StopCause.EOS
        assert said.flags(choice)[-1] == MASKED


async def test_an_open_think_block_stays_free(start: StartRig) -> None:
    rig = await start(max_model_len=1024)
    prompt = (*rig.prompt(), *rig.tok.encode_control("<think>\n"))
    said = await rig.say(
        prompt_ids=prompt,
        grammar=GRAMMAR,
        sampling=Sampling(seed=1),
        limits=Limits(max_tokens=400, reasoning_budget=3),
    )
    end = said.ids().index(rig.tok.control_ids["</think>"])
    assert set(said.flags()[:end]) == {SAMPLED}
    assert set(said.flags()[end + 2 :]) == {MASKED}
    assert "order" in answer(rig.tok.decode(said.ids()))


async def test_a_grammar_for_calls_leaves_other_replies_alone(start: StartRig) -> None:
    rig = await start()
    tools = [CallableTool(name="get_order", schema=None)]
    grammar = Grammar(text=after_tag_grammar(tools, max_calls=1), start=GrammarStart.CALLS)
    said = await rig.say(max_tokens=20, grammar=grammar, sampling=Sampling(seed=1))
    assert set(said.flags()) == {SAMPLED}
    assert said.stop() in (StopCause.LENGTH, StopCause.EOS)


async def test_a_grammar_that_does_not_compile_is_refused(start: StartRig) -> None:
    rig = await start()
    text = 'start: body\nbody: %json {"type": "string", "pattern": "(?=a)b"}\n'
    grammar = Grammar(text=text, param="response_format.json_schema.schema")
    for _ in range(2):
        with pytest.raises(RequestError, match="look-around") as caught:
            await rig.say(grammar=grammar)
        assert caught.value.param == "response_format.json_schema.schema"
        assert caught.value.status == 400


async def test_requests_with_and_without_grammar_run_side_by_side(start: StartRig) -> None:
    rig = await start(max_model_len=1024, num_slots=4)
    sampling = Sampling(seed=5, logit_bias=rig.long_winded.logit_bias)
    alone = await rig.say(max_tokens=60, sampling=sampling)
    others = [
        rig.say(max_tokens=400, grammar=GRAMMAR, sampling=Sampling(seed=seed), n=2)
        for seed in range(3)
    ]
    beside, *constrained = await asyncio.gather(rig.say(max_tokens=60, sampling=sampling), *others)
    assert beside.ids() == alone.ids()
    # another batch size rounds differently; the draws are the same
    assert beside.logprobs() == pytest.approx(alone.logprobs(), abs=1e-4)
    assert set(beside.flags()) == {SAMPLED}
    for said in constrained:
        assert "order" in answer(rig.tok.decode(said.ids(1)))
    assert (await rig.stats()).num_running == 0


async def test_length_ends_a_constrained_reply_too(start: StartRig) -> None:
    rig = await start()
    said = await rig.say(max_tokens=2, grammar=GRAMMAR, sampling=Sampling(seed=3))
    assert said.stop() is StopCause.LENGTH
    assert len(said.ids()) == 2
