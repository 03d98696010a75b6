"""How long a request that decodes waits for its tokens while the engine reads a long prompt.

The local engine itself, with its thread, its chunks and its sampling; no HTTP.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

import m1serve.model
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings
from m1serve.engine.launch import SWITCH_INTERVAL_S
from m1serve.engine.local import LocalEngine
from m1serve.engine.memory_plan import memory_for
from m1serve.engine.staging import Staged
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.types import Delta, GenerateRequest, Limits, Sampling, Started

_TALKER_PROMPT, _TALKER_ROOM = 1024, 8192
_ALONE_TOKENS = 64
_WARM_TOKENS = 256
"""Of a prompt that is read before: its kernels are compiled then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBeside:
    prompt_tokens: int
    read_seconds: float
    """From the request to its first token, the other decoding all the while"""
    tokens_per_s: float
    alone_ms: float
    """Between two tokens of the one that decodes, before the prompt came; median"""
    median_ms: float
    """The same while the prompt was read"""
    p99_ms: float
    max_ms: float
    num_tokens: int
    """That it said meanwhile"""


def measure_beside(model: M1ForCausalLM, num_tokens: int) -> ReadBeside:
    """One row decodes behind 1,024 tokens, then a prompt of `num_tokens` arrives."""
    config, itemsize = model.config, model.embed_tokens.weight.element_size()
    tokenizer = ChatTokenizer.load(Path(m1serve.model.__path__[0]) / "nano")
    longest = num_tokens + _TALKER_ROOM
    settings = EngineSettings(
        num_slots=2,
        max_model_len=longest,
        snapshot_bytes=0,
        memory_bytes=memory_for(config, num_slots=2, num_tokens=2 * longest, kv_itemsize=itemsize),
    )
    staged = Staged(
        model=model, weights_version="bench@0", phases_ms={}, parity_mean=0.0, parity_max=0.0
    )
    engine = LocalEngine(staged, settings=settings, tokenizer=tokenizer)
    vocab_size = min(tokenizer.vocab_size, config.vocab_size)
    interval_s = sys.getswitchinterval()
    # as a process that serves
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        return asyncio.run(_Run(engine, tokenizer.eos_id, vocab_size).measure(num_tokens))
    finally:
        sys.setswitchinterval(interval_s)


@dataclass(slots=True)
class _Run:
    engine: LocalEngine
    eos_id: int
    vocab_size: int
    times: list[float] = field(default_factory=list)
    """Of each token of the one that decodes"""
    said: asyncio.Event = field(default_factory=asyncio.Event)

    async def measure(self, num_tokens: int) -> ReadBeside:
        talk = asyncio.create_task(self._talk())
        try:
            await self._first_token_of("warm", _WARM_TOKENS)
            await self._said(_ALONE_TOKENS)
            begin = time.perf_counter()
            alone = self._gaps(0.0, begin)[-_ALONE_TOKENS:]
            await self._first_token_of("long", num_tokens)
            end = time.perf_counter()
        finally:
            await self.engine.abort("talker")
            await talk
            await self.engine.close()
        gaps = sorted(self._gaps(begin, end))
        return ReadBeside(
            prompt_tokens=num_tokens,
            read_seconds=end - begin,
            tokens_per_s=num_tokens / (end - begin),
            alone_ms=statistics.median(alone) * 1e3,
            median_ms=statistics.median(gaps) * 1e3,
            p99_ms=gaps[math.ceil(0.99 * len(gaps)) - 1] * 1e3,
            max_ms=gaps[-1] * 1e3,
            num_tokens=len(gaps),
        )

    async def _talk(self) -> None:
        async for item in self.engine.generate(self._request("talker", _TALKER_PROMPT, None)):
            if isinstance(item, Delta):
                self.times += [time.perf_counter()] * len(item.token_ids)
                self.said.set()

    async def _said(self, count: int) -> None:
        wanted = len(self.times) + count
        while len(self.times) < wanted:
            self.said.clear()
            await self.said.wait()

    async def _first_token_of(self, name: str, num_tokens: int) -> None:
        async for item in self.engine.generate(self._request(name, num_tokens, 1)):
            if not isinstance(item, Started):
                return

    def _gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between tokens, of which the later came in this time."""
        return [b - a for a, b in pairwise(self.times) if begin <= b <= end]

    def _request(self, name: str, num_tokens: int, max_tokens: int | None) -> GenerateRequest:
        generator = torch.Generator().manual_seed(num_tokens)
        ids = torch.randint(self.vocab_size, (num_tokens,), generator=generator)
        return GenerateRequest(
            id=name,
            prompt_ids=tuple(ids.tolist()),
            limits=Limits(max_tokens=max_tokens or _TALKER_ROOM - _TALKER_PROMPT - 1),
            # random weights would end their answer at any time
            sampling=Sampling(logit_bias=((self.eos_id, -100.0),)),
        )
