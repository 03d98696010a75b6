"""What a load found out: outcomes by status, latencies as percentiles, throughput. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from m1serve.clients.load_plan import LoadPlan

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one request. Seconds count from its start, `started_s` from the load's."""

    outcome: Literal["done", "aborted", "error"]
    started_s: float
    total_s: float
    late_s: float = 0.0
    """How much later than planned it began: the generator's own lag."""
    error: str | None = None
    """A status, or what broke."""
    ttft_s: float | None = None
    """To the first piece of reasoning, content or call."""
    gaps_s: tuple[float, ...] = ()
    """Between pieces; a piece may hold several tokens."""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def inter_token_s(self) -> float | None:
        """Mean time of a token after the first."""
        if self.outcome != "done" or self.ttft_s is None or self.completion_tokens < 2:
            return None
        return sum(self.gaps_s) / (self.completion_tokens - 1)


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """None when there are none."""
    if not seconds:
        return None
    found = np.percentile(np.array(seconds) * 1e3, PERCENTILES)
    named = {f"p{p}": round(float(v), 3) for p, v in zip(PERCENTILES, found, strict=True)}
    return named | {"mean": round(float(np.mean(seconds)) * 1e3, 3), "num": len(seconds)}


def summary(plan: LoadPlan, answers: Sequence[Answer], *, took_s: float) -> dict[str, object]:
    """`took_s`: from the first request to the last byte."""
    done = [answer for answer in answers if answer.outcome == "done"]
    errors = Counter(answer.error for answer in answers if answer.outcome == "error")
    inter_token = [t for answer in done if (t := answer.inter_token_s) is not None]
    return {
        "plan": asdict(plan),
        "requests": len(answers),
        "done": len(done),
        "aborted": sum(answer.outcome == "aborted" for answer in answers),
        "errors": dict(errors),
        "took_s": round(took_s, 3),
        "requests_per_s": round(len(done) / took_s, 3),
        "completion_tokens_per_s": round(sum(a.completion_tokens for a in done) / took_s, 1),
        "prompt_tokens_per_s": round(sum(a.prompt_tokens for a in done) / took_s, 1),
        "ttft_ms": percentiles_ms([a.ttft_s for a in done if a.ttft_s is not None]),
        "inter_token_ms": percentiles_ms(inter_token),
        "between_pieces_ms": percentiles_ms([gap for a in done for gap in a.gaps_s]),
        "end_to_end_ms": percentiles_ms([answer.total_s for answer in done]),
        "started_late_ms": percentiles_ms([answer.late_s for answer in answers]),
    }
