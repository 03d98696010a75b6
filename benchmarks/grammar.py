"""What a grammar costs a row of nano's engine: time a step with and without it. JSON out.

    python benchmarks/grammar.py [--rows 1 16] [--tokens 200] [--rounds 3] [--out FILE]

Both kinds say as many tokens and run in turn in one process; the constraint alone is timed beside
them, as a step's time scatters by more. Not covered: GPUs, and vocabularies of M1's size.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import torch

from m1serve.chat.grammar import json_grammar
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings, Settings
from m1serve.engine.grammar_compiler import GrammarCompiler
from m1serve.engine.local import LocalEngine
from m1serve.model.checkpoint import load_model
from m1serve.model.weights import version_path, write_version
from m1serve.types import Delta, GenerateRequest, Grammar, Limits, Sampling, VersionRef

PROMPT = tuple(range(100, 150))
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 5000}
GRAMMAR = Grammar(text=json_grammar(NUMBERS))
KINDS: dict[str, Grammar | None] = {"free": None, "masked": GRAMMAR}


def start(home: Path) -> tuple[LocalEngine, ChatTokenizer]:
    model_dir = Settings().model_dir
    write_version(
        home,
        weights_version="nano@0",
        model=load_model(model_dir),
        tokenizer_file=model_dir / "tokenizer.json",
        parent=None,
        run_id=None,
        golden_prompts=[list(range(10, 30))],
    )
    tokenizer = ChatTokenizer.load(model_dir)
    version = VersionRef(weights_version="nano@0", path=str(version_path(home, "nano@0")))
    settings = EngineSettings(num_slots=64, max_model_len=2048)
    return LocalEngine.start(version, settings=settings, tokenizer=tokenizer), tokenizer


async def say(
    engine: LocalEngine, tokenizer: ChatTokenizer, kind: str, *, rows: int, tokens: int
) -> None:
    """Rows of exactly so many tokens; every row is bent in both kinds, so that the mask alone
    makes the difference."""
    never = ((tokenizer.eos_id, -100.0), (tokenizer.control_ids["<think>"], -100.0))
    request = GenerateRequest(
        id=f"{kind}-{time.monotonic_ns()}",
        prompt_ids=PROMPT,
        limits=Limits(max_tokens=tokens),
        sampling=Sampling(seed=1, logit_bias=never),
        n=rows,
        grammar=KINDS[kind],
        min_delta_interval_s=math.inf,
    )
    said = [item async for item in engine.generate(request) if isinstance(item, Delta)]
    assert all(len(delta.token_ids) == tokens for delta in said), "a row ended early"


async def constraint_us(tokens: int) -> float:
    """CPU time of mask and observe for a token, without an engine around them."""
    tokenizer, random = ChatTokenizer.load(Settings().model_dir), Random(1)
    compiler = GrammarCompiler(tokenizer)
    request = GenerateRequest(
        id="alone", prompt_ids=PROMPT, limits=Limits(max_tokens=tokens), grammar=GRAMMAR
    )
    constraint, spent = (await compiler.constraints(request))(), 0.0
    compiler.close()
    assert constraint is not None
    constraint.observe(tokenizer.encode_text("[")[0])
    for _ in range(tokens):
        began = time.thread_time()
        mask = constraint.mask()
        spent += time.thread_time() - began
        assert mask is not None
        allowed = [i for i in range(tokenizer.vocab_size) if mask[i >> 3] >> (i & 7) & 1]
        token_id = random.choice(allowed)
        began = time.thread_time()
        constraint.observe(token_id)
        spent += time.thread_time() - began
    return spent / tokens * 1e6


async def measure(*, rows: int, tokens: int, rounds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as home:
        engine, tokenizer = start(Path(home))
        cpu: dict[str, list[float]] = {kind: [] for kind in KINDS}
        wall: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(rounds + 1):
            for kind in KINDS:
                began, spent = time.perf_counter(), time.process_time()
                await say(engine, tokenizer, kind, rows=rows, tokens=tokens)
                cpu[kind].append((time.process_time() - spent) / tokens * 1e3)
                wall[kind].append((time.perf_counter() - began) / tokens * 1e3)
        await engine.close()
    # the first round warms up
    step_ms = {kind: statistics.median(cpu[kind][1:]) for kind in KINDS}
    return {
        "rows": rows,
        "cpu_ms_per_step": step_ms,
        "wall_ms_per_step": {kind: statistics.median(wall[kind][1:]) for kind in KINDS},
        "cpu_us_per_masked_token": (step_ms["masked"] - step_ms["free"]) / rows * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    measured = [
        asyncio.run(measure(rows=rows, tokens=asked.tokens, rounds=asked.rounds))
        for rows in asked.rows
    ]
    report = {
        "command": " ".join(["python", *sys.argv]),
        "model": "nano",
        "constraint_cpu_us_per_token": asyncio.run(constraint_us(2000)),
        "steps": measured,
    }
    text = json.dumps(report, indent=2) + "\n"
    if asked.out is not None:
        asked.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
