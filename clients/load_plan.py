"""What a load is made of: arrivals, prompts and aborts, all drawn from one seed. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from m1serve.errors import ConfigError

MAX_REQUESTS = 1_000_000
_WORDS = ("order", "status", "refund", "ship", "late", "city", "price", "check", "when", "day")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Either `rate` (open loop) or `concurrency` (closed loop)."""

    duration_s: float
    rate: float | None = None
    """Requests a second that begin, whatever became of those before."""
    concurrency: int | None = None
    """Requests that are open at once."""
    prompt_words: int = 32
    max_tokens: int = 32
    abort_fraction: float = 0.0
    abort_within_s: float = 2.0
    """Aborts come at a moment drawn evenly from here back to the request's start."""
    timeout_s: float = 120.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for a load that cannot be made."""
        if (self.rate is None) == (self.concurrency is None):
            raise ConfigError(
                f"got rate {self.rate} and concurrency {self.concurrency}; give exactly one: "
                "--rate for an open loop, --concurrency for a closed one"
            )
        positive = {
            "--rate": self.rate,
            "--concurrency": self.concurrency,
            "--duration": self.duration_s,
            "--prompt-words": self.prompt_words,
            "--max-tokens": self.max_tokens,
            "--abort-within": self.abort_within_s,
            "--timeout": self.timeout_s,
        }
        for name, value in positive.items():
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value}; wanted a number above 0")
        if not 0 <= self.abort_fraction <= 1:
            raise ConfigError(f"--abort-fraction is {self.abort_fraction}; wanted 0 to 1")
        if self.rate is not None and self.rate * self.duration_s > MAX_REQUESTS:
            raise ConfigError(
                f"--rate {self.rate} for {self.duration_s} s are more than {MAX_REQUESTS} "
                "requests; ask for fewer"
            )

    @property
    def is_open_loop(self) -> bool:
        return self.rate is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """One request to make."""

    prompt: str
    abort_after_s: float | None


def shots(plan: LoadPlan) -> Iterator[Shot]:
    """Without end; the same for the same seed."""
    draw = random.Random(plan.seed)
    for number in itertools.count():
        words = draw.choices(_WORDS, k=plan.prompt_words)
        # no two prompts alike: a cache would answer for the model
        prompt = f"{number} {' '.join(words)}"
        is_aborted = draw.random() < plan.abort_fraction
        moment = draw.uniform(0, plan.abort_within_s)
        yield Shot(prompt=prompt, abort_after_s=moment if is_aborted else None)


def arrivals_s(plan: LoadPlan) -> Iterator[float]:
    """Of an open loop: seconds from the start, as a Poisson process, until the duration is over."""
    assert plan.rate is not None
    draw = random.Random(plan.seed + 1)
    at = 0.0
    while (at := at + draw.expovariate(plan.rate)) < plan.duration_s:
        yield at
