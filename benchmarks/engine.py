"""Sampling speed of LocalEngine beside the raw model, on random weights of nano's size. JSON out.

    python benchmarks/engine.py [--rows 1 16 64 128] [--tokens 64] [--rounds 3]

Raw is the least a sampler must do: forward, logits, softmax, draw. Both run in turn in one
process, and CPU seconds are counted beside the wall clock, so that the ratios mean something on a
machine that others use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings, Settings
from m1serve.engine.local import LocalEngine
from m1serve.engine.staging import Staged
from m1serve.model.directory import read_config
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.state import SequenceState
from m1serve.model.tiny import random_model, tiny_tokenizer
from m1serve.types import Delta, GenerateRequest, Limits

VOCAB_SIZE = 896
PROMPT = tuple(range(100, 150))


def talkative_model(vocab_size: int, eos_id: int) -> M1ForCausalLM:
    """Never samples its end of sentence: that logit is 0, the others are spread widely."""
    model = random_model(
        replace(read_config(Settings().model_dir), vocab_size=vocab_size)
    ).requires_grad_(False)
    model.lm_head.weight.mul_(6)
    model.lm_head.weight[eos_id] = 0
    return model


def filled_tokenizer(vocab_size: int) -> ChatTokenizer:
    """As many ids as the model has, whatever they mean."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<filler {i}>" for i in range(vocab_size - tokenizer.get_vocab_size())])
    return ChatTokenizer(tokenizer.to_str())


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    per_wall_s: float
    per_cpu_s: float


class Stopwatch:
    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def speed(self, num_tokens: int) -> Speed:
        return Speed(
            per_wall_s=num_tokens / (time.perf_counter() - self._wall_s),
            per_cpu_s=num_tokens / (time.process_time() - self._cpu_s),
        )


@torch.inference_mode()
def raw_speed(model: M1ForCausalLM, num_rows: int, num_tokens: int) -> Speed:
    state = SequenceState.allocate(model.config, num_rows, len(PROMPT) + num_tokens + 1)
    hidden, state = model.hidden(torch.tensor([PROMPT] * num_rows), state)
    last = hidden[:, -1]
    watch = Stopwatch()
    for _ in range(num_tokens):
        logprobs = torch.log_softmax(model.logits(last), -1)
        token = torch.multinomial(logprobs.exp(), 1)
        picked, ids = logprobs.gather(1, token).tolist(), token.tolist()
        assert len(picked) == len(ids)
        hidden, state = model.hidden(token, state)
        last = hidden[:, 0]
    return watch.speed(num_rows * num_tokens)


async def engine_speed(engine: LocalEngine, num_rows: int, num_tokens: int) -> Speed:
    """From the first token of all rows to the last, so that reading the prompt is left out."""
    request = GenerateRequest(
        id=f"{time.perf_counter_ns()}",
        prompt_ids=PROMPT,
        limits=Limits(max_tokens=num_tokens),
        n=num_rows,
        min_delta_interval_s=math.inf,
    )
    watch, num_sampled = Stopwatch(), 0
    async for item in engine.generate(request):
        if isinstance(item, Delta):
            num_sampled += len(item.token_ids)
        else:
            watch = Stopwatch()
    return watch.speed(num_sampled)


async def compare(rows: Sequence[int], num_tokens: int, num_rounds: int) -> list[dict[str, float]]:
    tokenizer = filled_tokenizer(VOCAB_SIZE)
    model = talkative_model(VOCAB_SIZE, tokenizer.eos_id)
    staged = Staged(
        model=model, weights_version="bench@0", phases_ms={}, parity_mean=0, parity_max=0
    )
    settings = EngineSettings(num_slots=max(rows), max_model_len=1024)
    engine = LocalEngine(staged, settings=settings, tokenizer=tokenizer)
    results = []
    for num_rows in rows:
        rounds = [
            (
                raw_speed(model, num_rows, num_tokens),
                await engine_speed(engine, num_rows, num_tokens),
            )
            for _ in range(num_rounds)
        ]
        results.append(
            {
                "rows": num_rows,
                "raw_tokens_per_s": round(max(raw.per_wall_s for raw, _ in rounds)),
                "engine_tokens_per_s": round(max(ours.per_wall_s for _, ours in rounds)),
                "wall_ratio": _median(ours.per_wall_s / raw.per_wall_s for raw, ours in rounds),
                "cpu_ratio": _median(ours.per_cpu_s / raw.per_cpu_s for raw, ours in rounds),
            }
        )
    await engine.close()
    return results


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(json.dumps(asyncio.run(compare(args.rows, args.tokens, args.rounds)), indent=1))


if __name__ == "__main__":
    main()
