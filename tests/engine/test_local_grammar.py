"""Constrained decoding on a real, random model: masks, draws, forced ends, dead ends."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from m1serve.chat.grammar import CallableTool, calls_grammar, json_grammar
from m1serve.chat.reply import parse_reply
from m1serve.types import (
    Grammar,
    InFlight,
    Limits,
    Sampling,
    StopCause,
    TokenFlag,
    VersionRef,
)

StartRig = Callable[..., Awaitable[Any]]

SAMPLED = TokenFlag.SAMPLED.value
MASKED = (TokenFlag.SAMPLED | TokenFlag.MASKED).value
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "status": {"enum": ["pending", "done"]},
        "total": {"type": "integer", "minimum": -50, "maximum": 5000},
        "lines": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "note": {"type": "string", "pattern": "^[a-z]{1,8}$"},
    },
    "required": ["status", "total", "lines"],
    "additionalProperties": False,
}
GRAMMAR = Grammar(text=json_grammar(SCHEMA))


@pytest.fixture
def no_thought(tok: Any) -> tuple[tuple[int, float], ...]:
    """A random model may open a think block and stay in it."""
    return ((tok.control_ids["<think>"], -100.0),)


@pytest.mark.parametrize(
    "bent",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 1.7, "top_p": 0.6},
        {"top_k": 2, "min_p": 0.2},
        {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    ],
)
async def test_every_draw_fits_the_schema_however_it_is_sampled(
    local: StartRig, no_thought: tuple[tuple[int, float], ...], bent: dict[str, float]
) -> None:
    rig = await local(max_model_len=1024)
    all_said = await asyncio.gather(
        *(
            rig.say(
                max_tokens=700,
                grammar=GRAMMAR,
                sampling=Sampling(seed=seed, logit_bias=no_thought, **bent),
            )
            for seed in range(12)
        )
    )
    num_ended = 0
    for said in all_said:
        assert set(said.flags()) == {MASKED}
        if said.stop() is StopCause.EOS:
            text = rig.tok.decode(said.ids()[:-1])
            jsonschema.validate(json.loads(text), SCHEMA)
            num_ended += 1
        else:
            # whitespace is bounded, so that greedy loops end too
            assert said.stop() is StopCause.LENGTH
    assert num_ended >= 10


async def test_logprobs_stay_the_models_own_and_the_mask_has_its_own(local: StartRig) -> None:
    rig = await local(max_model_len=1024)
    said = await rig.say(max_tokens=300, grammar=GRAMMAR, sampling=Sampling(seed=2))
    scored = await rig.engine.score((*rig.prompt(), *said.ids()))
    own = scored.logprobs[len(rig.prompt()) - 1 :]
    assert said.logprobs() == pytest.approx(own, abs=1e-4)
    sampled = [p for delta in said.deltas[0] for p in delta.sampled_logprobs]
    assert all(math.isfinite(p) and p <= 1e-6 for p in sampled)
    # a mask only takes away: what is left got likelier
    assert all(s >= p - 1e-4 for s, p in zip(sampled, said.logprobs(), strict=True))
    assert sum(sampled) > sum(said.logprobs()) + 1


async def test_the_reply_may_open_a_think_block_first(local: StartRig) -> None:
    rig = await local(max_model_len=1024)
    think = ((rig.tok.control_ids["<think>"], 100.0),)
    said = await rig.say(
        grammar=GRAMMAR,
        sampling=Sampling(seed=2, logit_bias=think, repetition_penalty=2.0),
        limits=Limits(max_tokens=3),
    )
    assert said.ids()[0] == rig.tok.control_ids["<think>"]
    assert said.flags() == (MASKED, SAMPLED, SAMPLED)


async def test_ending_inside_the_think_block_closes_it_instead(local: StartRig) -> None:
    rig = await local(max_model_len=1024)
    prompt = (*rig.prompt(), *rig.tok.encode_control("<think>\n"))
    wants_to_end = ((rig.tok.eos_id, 100.0),)
    said = await rig.say(
        prompt_ids=prompt,
        max_tokens=500,
        grammar=Grammar(text=json_grammar(None)),
        sampling=Sampling(seed=2, logit_bias=wants_to_end),
    )
    closing = tuple(rig.tok.encode_control("</think>\n"))
    assert said.ids()[: len(closing)] == closing
    assert set(said.flags()[: len(closing)]) == {TokenFlag.FORCED.value}
    assert said.stop() is StopCause.EOS
    assert isinstance(json.loads(rig.tok.decode(said.ids()[len(closing) : -1])), dict)


async def test_required_calls_parse(
    local: StartRig, no_thought: tuple[tuple[int, float], ...]
) -> None:
    rig = await local(max_model_len=1024)
    tools = [
        CallableTool(name='get "it"', schema=SCHEMA),
        CallableTool(name="änder", schema={"type": "object", "additionalProperties": False}),
    ]
    grammar = Grammar(text=calls_grammar(tools, max_calls=2))
    num_called = 0
    for seed in range(8):
        said = await rig.say(
            max_tokens=800, grammar=grammar, sampling=Sampling(seed=seed, logit_bias=no_thought)
        )
        if said.stop() is not StopCause.EOS:
            continue
        reply = parse_reply(rig.tok.decode(said.ids()[:-1]))
        assert reply.is_well_formed
        assert 1 <= len(reply.tool_calls) <= 2
        assert {call.name for call in reply.tool_calls} <= {tool.name for tool in tools}
        num_called += 1
    assert num_called >= 4


async def test_a_grammar_of_one_reply_is_said_with_certainty(local: StartRig) -> None:
    rig = await local()
    bias = ((rig.tok.control_ids["<think>"], -100.0),)
    said = await rig.say(
        max_tokens=50,
        grammar=Grammar(text='start: "yes, please"\n'),
        sampling=Sampling(seed=1, logit_bias=bias),
    )
    assert rig.tok.decode(said.ids()) == "yes, please<end_of_sentence>"


async def test_a_dead_end_stops_its_choice_with_an_error_and_no_other(local: StartRig) -> None:
    rig = await local(max_model_len=2048, num_slots=4)
    # behind the first letter there are more ways to go on than a matcher may keep
    ways = "".join(f"w{i}: /b/ c{i}\nc{i}: /c/ | /d{i}/\n" for i in range(6000))
    bad = f'start: "a" ({" | ".join(f"w{i}" for i in range(6000))})\n{ways}'
    beside = asyncio.create_task(rig.say(max_tokens=100))
    sampling = Sampling(seed=1, logit_bias=((rig.tok.control_ids["<think>"], -100.0),))
    said = await rig.say(max_tokens=50, grammar=Grammar(text=bad), sampling=sampling, n=2)
    assert [said.stop(0), said.stop(1)] == [StopCause.ERROR, StopCause.ERROR]
    assert rig.tok.decode(said.ids()) == "a"
    assert "cannot be followed" in (said.detail() or "")
    assert len(said.flags()) == len(said.ids())
    assert (await beside).stop() is StopCause.LENGTH
    assert rig.engine.stats().num_running == 0


async def test_a_swap_that_recomputes_goes_on_under_the_grammar(
    local: StartRig, versions: tuple[VersionRef, VersionRef]
) -> None:
    rig = await local(max_model_len=1024)
    schema = {"type": "array", "items": {"enum": [10, 20]}, "minItems": 60, "maxItems": 60}
    request = rig.request(
        max_tokens=900,
        grammar=Grammar(text=json_grammar(schema)),
        sampling=Sampling(seed=4, logit_bias=((rig.tok.control_ids["<think>"], -100.0),)),
        in_flight=InFlight.RECOMPUTE,
    )
    items, ids, names = rig.open(request), [], []
    await anext(items)
    async for delta in items:
        ids += delta.token_ids
        names += [delta.weights_version] * len(delta.token_ids)
        if len(names) == 5:
            await rig.engine.load(versions[1])
    assert set(names) == {"tiny@0", "tiny@1"}
    value = json.loads(rig.tok.decode(ids).removesuffix("<end_of_sentence>"))
    assert len(value) == 60
    assert set(value) <= {10, 20}


async def test_an_aborted_constrained_request_frees_its_rows(local: StartRig) -> None:
    rig = await local(max_model_len=2048)
    endless = Grammar(text="start: /a/ start | /a/\n")
    items = rig.open(rig.request(max_tokens=1500, grammar=endless, n=3))
    await anext(items)
    await anext(items)
    await items.aclose()
    async with asyncio.timeout(5):
        while rig.engine.stats().num_running:  # noqa: ASYNC110 - stats have no event
            await asyncio.sleep(0.005)


async def test_a_seed_means_the_same_reply_beside_others(local: StartRig) -> None:
    rig = await local(max_model_len=1024)
    request = rig.request(max_tokens=300, grammar=GRAMMAR, sampling=Sampling(seed=9))
    asked = {"grammar": GRAMMAR, "sampling": request.sampling, "max_tokens": 300}
    alone = await rig.say(**asked)
    many = await asyncio.gather(
        *(rig.say(**{**asked, "sampling": replace(request.sampling, seed=s)}) for s in (1, 9, 2))
    )
    assert many[1].ids() == alone.ids()
