"""How fast turns get from an event loop to the ledger: `python benchmarks/store.py [--url URL]`.

Prints one JSON object: microseconds of an append on the loop's thread, turns a second through the
journal's fsync, turns a second from the journal into the database, and reads.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import struct
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from m1serve.store import Store
from m1serve.store.journal import JournalWriter
from m1serve.store.records import SessionEnded, TurnRecord
from m1serve.store.sidecar import Sidecar
from m1serve.types import HistoryRule, Mode, Sampling, StopCause, VersionSpan

VOCAB_SIZE = 200_064


def sessions(num: int, num_turns: int, prompt_tokens: int, sampled_tokens: int) -> list[TurnRecord]:
    """Conversations that extend exactly, with ids as skewed as text's and float32 logprobs."""
    draw = random.Random(0)
    turns = []
    for index in range(num):
        history = _ids(draw, prompt_tokens)
        for position in range(num_turns):
            turn = _turn(draw, index, history, sampled_tokens)
            turns.append(replace(turn, created_at=1e9 + index + position / num_turns))
            history = (*history, *turn.completion_ids, *_ids(draw, 50))
    return turns


def _ids(draw: random.Random, num: int) -> tuple[int, ...]:
    return tuple(min(int(draw.paretovariate(0.6)), VOCAB_SIZE) - 1 for _ in range(num))


def _turn(draw: random.Random, index: int, prompt: tuple[int, ...], num_sampled: int) -> TurnRecord:
    logprobs = [-draw.expovariate(2.0) for _ in range(num_sampled)]
    rounded = struct.unpack(f"{num_sampled}f", struct.pack(f"{num_sampled}f", *logprobs))
    name = uuid.uuid4().hex
    return TurnRecord(
        turn_id=name,
        request_id=name,
        session_id=f"s{index}",
        group_key=f"g{index // 8}",
        task_id="sums/train/1",
        tenant_id="tenant",
        key_id="key",
        model_id="nano",
        mode=Mode.TRAIN,
        consent=True,
        created_at=0.0,
        choice=0,
        num_choices=1,
        history_rule=HistoryRule.EXACT,
        request_hash=name,
        retry_count=0,
        prompt_ids=prompt,
        completion_ids=_ids(draw, num_sampled),
        logprobs=rounded,
        sampled_logprobs=None,
        token_flags=(1,) * num_sampled,
        version_spans=(VersionSpan(start=0, end=num_sampled, weights_version="nano@0"),),
        sampling=Sampling(),
        stop=StopCause.EOS,
        stop_detail=None,
        finish_reason="stop",
        was_delivered=True,
        cached_tokens=0,
        tokenizer_digest="t",
        template_digest="t",
        numerics_digest="n",
        ttft_ms=1.0,
        total_ms=1.0,
    )


def append_us(writer: JournalWriter, turns: Sequence[TurnRecord], pause_s: float) -> list[float]:
    """Of each append; the pause plays the event loop's other work."""
    took = []
    for turn in turns:
        began = time.perf_counter()
        writer.append(turn)
        took.append(1e6 * (time.perf_counter() - began))
        if pause_s:
            time.sleep(pause_s)
    return took


def measure(url: str, directory: Path, options: argparse.Namespace) -> dict[str, float]:
    turns = sessions(options.sessions, options.turns, options.prompt_tokens, options.sampled_tokens)
    store = Store.open(url)
    writer = JournalWriter(directory / "journal")
    began = time.perf_counter()
    appends = append_us(writer, turns, 0.0)
    writer.flush()
    journal_s = time.perf_counter() - began
    for index in range(options.sessions):
        writer.append(
            SessionEnded(session_id=f"s{index}", tenant_id="tenant", at=2e9, reason="end")
        )
    writer.close()
    num_bytes = sum(path.stat().st_size for path in (directory / "journal").rglob("*.seg"))
    began = time.perf_counter()
    num_new = Sidecar(store, directory / "journal").run_once()
    ingest_s = time.perf_counter() - began
    assert num_new == len(turns) + options.sessions
    ids = [row.trajectory_id for row in store.ledger.list_trajectories(limit=200)]
    began = time.perf_counter()
    views = store.ledger.trajectories(ids)
    read_s = time.perf_counter() - began
    store.close()
    quiet = JournalWriter(directory / "quiet")
    paced = append_us(quiet, turns[:300], 0.002)
    quiet.close()
    return {
        "turns": len(turns),
        "append_us_p50": statistics.median(appends),
        "append_us_p99": statistics.quantiles(appends, n=100)[98],
        "append_paced_us_p50": statistics.median(paced),
        "append_paced_us_p99": statistics.quantiles(paced, n=100)[98],
        "journal_turns_per_s": len(turns) / journal_s,
        "journal_bytes_per_turn": num_bytes / len(turns),
        "ingest_turns_per_s": len(turns) / ingest_s,
        "read_turns_per_s": sum(len(view.turns) for view in views) / read_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="an empty database; a SQLite file by default")
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--sampled-tokens", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        url = options.url or f"sqlite:///{directory / 'store.db'}"
        numbers = measure(url, directory, options)
        db_bytes = sum(path.stat().st_size for path in directory.glob("store.db*"))
    shown = {
        "database": url.split(":")[0],
        "machine": platform.machine(),
        "prompt_tokens": options.prompt_tokens,
        "sampled_tokens": options.sampled_tokens,
        "database_bytes_per_turn": db_bytes / numbers["turns"],
        **numbers,
    }
    rounded = {k: round(v, 1) if isinstance(v, float) else v for k, v in shown.items()}
    print(json.dumps(rounded, indent=1))


if __name__ == "__main__":
    main()
