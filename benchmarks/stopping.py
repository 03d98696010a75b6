"""What the stop rules cost a token on the host, with and without the repetition count. JSON out.

`python benchmarks/stopping.py [--out FILE]`: one choice, 80,000 tokens, the best of nine passes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.engine.stopping import StopRules
from m1serve.types import GenerateRequest, Limits, RepetitionStop

NUM_TOKENS = 80_000
PASSES = 9
STREAMS = {
    "never sure": [-1.0],
    "always sure": [-0.001],
    "sure of every second": [-0.001, -1.0],
}


def ns_per_token(repetition: RepetitionStop | None, logprobs: list[float]) -> float:
    tok = byte_tokenizer()
    limits = Limits(max_tokens=NUM_TOKENS, repetition=repetition)
    request = GenerateRequest(id="r", prompt_ids=(5,), limits=limits)
    best = float("inf")
    for _ in range(PASSES):
        rules = StopRules(request, tokenizer=tok, max_model_len=2 * NUM_TOKENS)
        begun = time.perf_counter_ns()
        for num, logprob in enumerate(logprobs, start=1):
            rules.after(7, num, logprob)
        best = min(best, time.perf_counter_ns() - begun)
    return best / len(logprobs)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path)
    out: Path | None = options.parse_args().out
    # longer than the stream, so that it counts and never stops
    counting = RepetitionStop(num_tokens=NUM_TOKENS + 1)
    rows = []
    for name, values in STREAMS.items():
        logprobs = (values * NUM_TOKENS)[: NUM_TOKENS - 1]
        off, on = ns_per_token(None, logprobs), ns_per_token(counting, logprobs)
        rows.append({"logprobs": name, "off_ns": round(off, 1), "on_ns": round(on, 1)})
    result = {
        "command": "python " + " ".join(sys.argv),
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
