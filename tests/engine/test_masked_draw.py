"""The sampler under masks: rows without a grammar draw as ever, to the bit."""

from __future__ import annotations

from typing import Any, cast

import torch

from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.chat.grammar import json_grammar
from m1serve.engine.generation import Generation, Sequence
from m1serve.engine.grammar_compiler import GrammarCompiler
from m1serve.engine.sampler import Sampler, seeded_rng
from m1serve.engine.stopping import StopRules
from m1serve.engine.token_ids import TokenIds
from m1serve.types import GenerateRequest, Grammar, Limits, Sampling

TOK = byte_tokenizer()
GRAMMAR = Grammar(text=json_grammar({"type": "integer"}))


async def sequence(sampling: Sampling, grammar: Grammar | None, seed: int) -> Sequence:
    request = GenerateRequest(
        id="r", prompt_ids=(5, 6), limits=Limits(max_tokens=9), sampling=sampling, grammar=grammar
    )
    compiler = GrammarCompiler(TOK)
    new_constraint = await compiler.constraints(request)
    compiler.close()
    prompt = TokenIds.of(request.prompt_ids)
    return Sequence(
        generation=Generation(request=request, prompt=prompt, outlet=cast(Any, None), order=0),
        unread=prompt,
        choice=0,
        rules=StopRules(request, tokenizer=TOK, max_model_len=100),
        budget=None,
        constraint=new_constraint(),
        rng=seeded_rng(seed, 0),
    )


async def draw(grammar: Grammar | None) -> list[tuple[Any, ...]]:
    """Five steps of four rows, of which the second may be under a grammar."""
    asked = [
        Sampling(seed=1),
        Sampling(seed=2),
        Sampling(seed=3, temperature=0.7, top_p=0.8, presence_penalty=0.5),
        Sampling(seed=4, temperature=0.0),
    ]
    rows = [
        await sequence(sampling, grammar if i == 1 else None, seed=i)
        for i, sampling in enumerate(asked)
    ]
    sampler = Sampler(vocab_size=TOK.vocab_size, device="cpu")
    plan = sampler.plan(rows)
    generator = torch.Generator().manual_seed(0)
    steps: list[tuple[Any, ...]] = []
    for _ in range(5):
        logits_NV = torch.randn(4, TOK.vocab_size + 3, generator=generator) * 4
        drawn = sampler.draw(logits_NV, rows, plan)
        for row, token_id in zip(rows, drawn.token_N.tolist(), strict=True):
            row.take(token_id, 0.0)
        assert drawn.sampled_logprob_M is not None
        of_bent = dict(zip(plan.bent, drawn.sampled_logprob_M.tolist(), strict=True))
        steps.append((drawn.token_N.tolist(), drawn.logprob_N.tolist(), of_bent))
    return steps


async def test_rows_beside_a_masked_one_draw_the_same_to_the_bit() -> None:
    free, masked = await draw(None), await draw(GRAMMAR)
    for one, other in zip(free, masked, strict=True):
        for i in (0, 2, 3):
            assert one[0][i] == other[0][i]
            assert one[1][i] == other[1][i]
            assert one[2].get(i) == other[2].get(i)
    assert [step[0][1] for step in free] != [step[0][1] for step in masked]


async def test_a_step_without_masks_computes_none() -> None:
    plain = await sequence(Sampling(seed=1), None, seed=1)
    sampler = Sampler(vocab_size=TOK.vocab_size, device="cpu")
    assert sampler.plan([plain]).bend is None
    under = await sequence(Sampling(seed=1), GRAMMAR, seed=1)
    plan = sampler.plan([plain, under])
    assert (plan.bent, plan.constrained, plan.steered) == ((1,), (0,), (1,))
