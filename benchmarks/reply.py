"""What the reply pipeline costs a token, by kind of answer and by length: linear, or not.

`python benchmarks/reply.py [--out FILE]`: detokenise, stop strings, parser; one token a delta.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import m1serve.model
from m1serve.api.choice import ChoiceStream
from m1serve.chat.reply import ReplyParser
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.types import Delta, StopCause

SIZES = (5_000, 20_000, 80_000)
STOPS = ("a" * 255 + "b", "END OF ANSWER", "\n\n\n\n", "Observation:")
WORDS = "The order 4217 is pending, so I cancel it <b>now</b>. "


def kinds(tok: ChatTokenizer, num: int) -> dict[str, list[int]]:
    """About `num` tokens of every kind of text that is held back or scanned for its end."""

    def of(head: str, filler: str, tail: str = "") -> list[int]:
        body = tok.encode_text(filler)
        ids = [*tok.encode_control(head), *body * (num // len(body)), *tok.encode_control(tail)]
        return ids[:num]

    call = '{"name": "look", "arguments": {"x": 1}}\n'
    return {
        "reasoning": of("<think>\n", WORDS),
        "content": of("", WORDS),
        "arguments": of('<tool_calls>\n{"name": "f", "arguments": {"x": "', WORDS, '"}}'),
        "name_without_end": of('<tool_calls>\n{"name": "', WORDS),
        "arguments_first": of('<tool_calls>\n{"arguments": {"x": "', WORDS),
        "behind_arguments": of('<tool_calls>\n{"name": "f", "arguments": {}, "x": "', WORDS),
        "many_calls": of("<tool_calls>\n", call),
        "no_calls": of("<tool_calls>\n", "f(x)\n"),
        "many_blocks": tok.encode_control("<tool_calls></tool_calls>") * (num // 2),
        "whitespace": of("x", " \n"),
        "whitespace_first": of("", "\n"),
        "beginnings_of_tags": of("", "<tool_call"),
        "almost_a_stop_string": of("", "a" * 64),
    }


def us_per_token(tok: ChatTokenizer, ids: Sequence[int], *, at_once: bool) -> float:
    """Best of three, microseconds."""
    size = len(ids) if at_once else 1
    deltas = [
        Delta(
            choice=0,
            token_ids=tuple(part),
            logprobs=(-0.5,) * len(part),
            token_flags=(1,) * len(part),
            weights_version="m@0",
        )
        for part in (ids[place : place + size] for place in range(0, len(ids), size))
    ]
    last = Delta(
        choice=0,
        token_ids=(),
        logprobs=(),
        token_flags=(),
        weights_version="m@0",
        stop=StopCause.LENGTH,
    )
    best = float("inf")
    for _ in range(3):
        choice = ChoiceStream(0, tok, stop_strings=STOPS, parser=ReplyParser())
        begun = time.perf_counter()
        for delta in deltas:
            choice.push(delta)
        choice.push(last)
        _ = choice.message, choice.finish_reason, choice.num_reasoning_tokens
        best = min(best, time.perf_counter() - begun)
    return round(best / len(ids) * 1e6, 3)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path)
    out: Path | None = options.parse_args().out
    tok = ChatTokenizer.load(Path(m1serve.model.__file__).parent / "nano")
    rows: list[dict[str, object]] = []
    for num in SIZES:
        for kind, ids in kinds(tok, num).items():
            rows.append(
                {
                    "kind": kind,
                    "num_tokens": len(ids),
                    "token_by_token_us": us_per_token(tok, ids, at_once=False),
                    "at_once_us": us_per_token(tok, ids, at_once=True),
                }
            )
            print(rows[-1], file=sys.stderr)
    result = json.dumps({"command": "python " + " ".join(sys.argv), "rows": rows}, indent=1)
    if out is not None:
        out.write_text(result + "\n", encoding="utf-8")
    else:
        print(result)


if __name__ == "__main__":
    main()
