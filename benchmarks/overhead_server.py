"""The server that overhead.py measures: uvicorn around an engine that costs nothing, in a process.

It notes when a request reached the engine, how long tokenising took, how long the loop stood still.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from multiprocessing.connection import Connection
from pathlib import Path

from m1serve.chat.tokenizer import CONTROL, TAGS, ChatTokenizer
from m1serve.types import (
    Capabilities,
    Delta,
    EngineStats,
    GenerateRequest,
    InFlight,
    Scored,
    Started,
    StopCause,
    SwapReport,
    VersionRef,
)

MODEL, VERSION = "bench", "bench@0"
TEXT = "Some words of a long answer, and then some more of them. "


class TimedTokenizer(ChatTokenizer):
    encode_s = 0.0

    def encode_text(self, text: str) -> list[int]:
        begin = time.perf_counter()
        ids = super().encode_text(text)
        self.encode_s += time.perf_counter() - begin
        return ids


def make_tokenizer(merges: Path) -> TimedTokenizer:
    """Byte-level BPE of a merges.txt with GPT-2's pre-tokeniser, and M1's control tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    lines = merges.read_text(encoding="utf-8").split("\n")[1:]
    pairs = [(left, right) for left, _, right in (line.partition(" ") for line in lines if line)]
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in pairs:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in CONTROL])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in TAGS])
    return TimedTokenizer(tokenizer.to_str(), source=str(merges))


class FreeEngine:
    """One token a delta, `max_tokens` of them, as fast as they are taken."""

    def __init__(self, tok: ChatTokenizer) -> None:
        self._tok = tok
        self._ids = tok.encode_text(TEXT)
        self.reached_at = self.ended_at = 0.0
        self.num_prompt_tokens = 0

    capabilities = Capabilities(
        max_model_len=2_000_000,
        vocab_size=2**31 - 1,
        max_top_logprobs=0,
        in_flight=frozenset({InFlight.FINISH}),
        has_prompt_logprobs=False,
        has_grammar=False,
        has_penalties=False,
        has_reasoning_budget=False,
    )
    weights_version = VERSION

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Started | Delta]:
        self.reached_at = time.perf_counter()
        self.num_prompt_tokens = len(request.prompt_ids)
        yield Started(cached_tokens=0, weights_version=VERSION)
        for place in range(request.limits.max_tokens - 1):
            if place % 64 == 63:
                await asyncio.sleep(0)
            yield _delta(self._ids[place % len(self._ids)], None)
        self.ended_at = time.perf_counter()
        yield _delta(self._tok.eos_id, StopCause.EOS)

    async def abort(self, request_id: str) -> None:
        del request_id

    async def score(
        self, token_ids: object, *, weights_version: str | None = None
    ) -> Scored:  # pragma: no cover - the contract has it
        raise NotImplementedError

    async def load(self, version: VersionRef) -> SwapReport:
        raise NotImplementedError

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=0,
            num_waiting=0,
            num_slots=1,
            versions=(VERSION,),
            sampled_tokens=0,
            prefilled_tokens=0,
            cached_tokens=0,
            num_swaps=0,
        )

    async def close(self) -> None:
        return


def _delta(token_id: int, stop: StopCause | None) -> Delta:
    return Delta(
        choice=0,
        token_ids=(token_id,),
        logprobs=(-0.5,),
        token_flags=(1,),
        weights_version=VERSION,
        stop=stop,
    )


async def bare_cpu_s(engine: FreeEngine, num_tokens: int) -> float:
    """CPU seconds to take a stream from the engine with nothing around it."""
    from m1serve.types import Limits

    request = GenerateRequest(id="bare", prompt_ids=(1,), limits=Limits(max_tokens=num_tokens))
    begin = time.process_time()
    async for _ in engine.generate(request):
        pass
    return time.process_time() - begin


class StallWatch:
    """The longest time for which the event loop ran nothing else."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(0.001)
            self.longest_s = max(self.longest_s, time.perf_counter() - begin - 0.001)


def serve(port: int, merges: Path, home: Path, pipe: Connection) -> None:
    """The process. Each word received is a question; the answer goes back as JSON."""
    import uvicorn

    from m1serve.api import create_app
    from m1serve.config import ModelSettings, Settings
    from m1serve.store.journal import JournalWriter

    tok = make_tokenizer(merges)
    engine, watch = FreeEngine(tok), StallWatch()
    journal = JournalWriter(home / "journal")
    app = create_app(engine, journal, Settings(home=home, model=ModelSettings(model_id=MODEL)), tok)
    server = uvicorn.Server(
        uvicorn.Config(app, port=port, log_level="error", access_log=False, loop="asyncio")
    )

    def note() -> dict[str, float]:
        said = {
            "reached_at": engine.reached_at,
            "ended_at": engine.ended_at,
            "num_prompt_tokens": engine.num_prompt_tokens,
            "encode_s": tok.encode_s,
            "stall_s": watch.longest_s,
            "cpu_s": time.process_time(),
        }
        tok.encode_s = watch.longest_s = 0.0
        return said

    async def run() -> None:
        serving, watching = asyncio.create_task(server.serve()), asyncio.create_task(watch.run())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        pipe.send(json.dumps({}))
        while (word := await asyncio.to_thread(pipe.recv)) != "end":
            if word == "note":
                pipe.send(json.dumps(note()))
            else:
                pipe.send(json.dumps({"bare_cpu_s": await bare_cpu_s(engine, int(word))}))
        server.should_exit = True
        watching.cancel()
        await serving

    asyncio.run(run())
    journal.close()


def texts(roots: Iterable[Path], num_chars: int) -> str:
    """Ordinary prose and code: the files one after another, over and over."""
    whole = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in roots)
    return (whole * (num_chars // len(whole) + 1))[:num_chars]
