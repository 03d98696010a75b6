"""What the demo found out, and whether that is enough. Values and pure functions only."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from m1serve.clients.stats import Interval, is_worse_beyond_noise, paired_gain, wilson

MIN_GAIN = 0.20
MIN_GAIN_LOW = 0.10
MIN_TRAJECTORIES = 1500
MAX_SECONDS = 720.0
MAX_UNSCORED_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Held-out tasks, once each, with the product's own verdict on every one."""

    label: str
    weights_version: str
    successes: Mapping[str, bool]
    """By task id; the family is the part before the first slash."""
    unscored: tuple[str, ...] = ()
    """Tasks that no scorer could judge: neither solved nor failed."""

    def of_family(self, family: str) -> dict[str, bool]:
        return {k: v for k, v in self.successes.items() if family_of(k) == family}

    @property
    def rate(self) -> Interval:
        return rate_of(self.successes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """One turn of the loop: episodes played, a run, its outcome and the swap."""

    number: int
    run_id: str
    outcome: str
    """promoted | rejected | skipped | failed"""
    reason: str
    parent_version: str
    """What sampled the episodes."""
    weights_version: str
    """What serves afterwards."""
    num_episodes: int
    success: float
    num_tokens: int
    metrics: Mapping[str, float]
    swap_ms: float | None
    """Switching the replica, staging and verification included; None when nothing was swapped."""
    seconds: Mapping[str, float]
    """play, score, train (gates included), swap"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    before: Evaluation
    after: Evaluation
    cycles: tuple[Cycle, ...]
    poisoned: Cycle
    """A run with negated advantages and a far too high learning rate."""
    num_requests: int
    failures: tuple[str, ...]
    num_trajectories: int
    num_tokens: int
    num_restarts: int
    seconds: float
    is_small: bool

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(family_of(k) for k in self.before.successes))

    @property
    def promoted(self) -> tuple[Cycle, ...]:
        return tuple(c for c in self.cycles if c.outcome == "promoted")

    @property
    def family_level(self) -> float:
        """Bonferroni: so that all families together are within their intervals with 95%."""
        return 1 - 0.05 / max(1, len(self.families))

    def gain(self, family: str | None = None, *, level: float = 0.95) -> Interval:
        before, after = self.before.successes, self.after.successes
        ids = [k for k in before if k in after and family in (None, family_of(k))]
        pairs = [(float(before[k]), float(after[k])) for k in ids]
        return paired_gain([b for b, _ in pairs], [a for _, a in pairs], level=level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    text: str
    is_met: bool


def family_of(task_id: str) -> str:
    return task_id.partition("/")[0]


def short(reason: str, *, num_chars: int = 140) -> str:
    """A gate may list every family; the report has the whole text."""
    return reason if len(reason) <= num_chars else f"{reason[:num_chars].rsplit(' ', 1)[0]} ..."


def rate_of(successes: Mapping[str, bool]) -> Interval:
    return wilson(sum(successes.values()), len(successes))


def bars(report: Report) -> list[Bar]:
    """What must hold for exit code 0. A small demo proves the mechanism, not the gain."""
    poisoned = report.poisoned
    num_failed = sum(c.outcome == "failed" for c in report.cycles)
    mechanism = [
        Bar(
            text=f"poisoned candidate refused: {poisoned.outcome}, {short(poisoned.reason)}",
            is_met=poisoned.outcome == "rejected"
            and poisoned.reason.startswith("gate:")
            and poisoned.weights_version == poisoned.parent_version,
        ),
        Bar(text=f"failed requests {len(report.failures)} = 0", is_met=not report.failures),
        Bar(text=f"failed runs {num_failed} = 0", is_met=num_failed == 0),
        Bar(text=f"process restarts {report.num_restarts} = 0", is_met=report.num_restarts == 0),
        _verdicts_bar(report),
    ]
    if report.is_small:
        num = len(report.promoted)
        return [Bar(text=f"versions promoted {num} >= 1", is_met=num >= 1), *mechanism]
    gain = report.gain()
    level = report.family_level
    worse = [f for f in report.families if is_worse_beyond_noise(report.gain(f, level=level))]
    return [
        Bar(text=f"gain {gain.value:+.3f} >= {MIN_GAIN}", is_met=gain.value >= MIN_GAIN),
        Bar(
            text=f"lower end of its 95% interval {gain.low:+.3f} >= {MIN_GAIN_LOW}",
            is_met=gain.low >= MIN_GAIN_LOW,
        ),
        Bar(
            text=f"families worse beyond noise ({level:.1%} each, 95% together): "
            f"{', '.join(worse) or 'none'}",
            is_met=not worse,
        ),
        *mechanism,
        Bar(
            text=f"trajectories {report.num_trajectories} >= {MIN_TRAJECTORIES}",
            is_met=report.num_trajectories >= MIN_TRAJECTORIES,
        ),
        Bar(
            text=f"seconds {report.seconds:.0f} <= {MAX_SECONDS:.0f}",
            is_met=report.seconds <= MAX_SECONDS,
        ),
    ]


def _verdicts_bar(report: Report) -> Bar:
    """Left out of the rates, so they must be few."""
    both = (report.before, report.after)
    num = sum(len(e.unscored) for e in both)
    total = num + sum(len(e.successes) for e in both)
    return Bar(
        text=f"held-out episodes without a verdict {num} of {total} <= {MAX_UNSCORED_SHARE:.0%}",
        is_met=num <= MAX_UNSCORED_SHARE * total,
    )


def summary(report: Report) -> dict[str, object]:
    """The object of the last line, M1SERVE_DEMO."""
    gain = report.gain()
    swaps_ms = [c.swap_ms for c in report.cycles if c.swap_ms is not None]
    return {
        "before": round(report.before.rate.value, 4),
        "after": round(report.after.rate.value, 4),
        "delta_ci_low": round(gain.low, 4),
        "delta_ci_high": round(gain.high, 4),
        "failed_requests": len(report.failures),
        "requests": report.num_requests,
        "trajectories": report.num_trajectories,
        "tokens": report.num_tokens,
        "versions": len(report.promoted),
        "serving": report.after.weights_version,
        "swap_ms": round(statistics.median(swaps_ms), 1) if swaps_ms else None,
        "swap_ms_max": round(max(swaps_ms), 1) if swaps_ms else None,
        "mismatch_kl": worst(report.cycles, "mismatch_kl"),
        "poisoned": report.poisoned.outcome,
        "restarts": report.num_restarts,
        "small": report.is_small,
        "held": all(bar.is_met for bar in bars(report)),
        "seconds": round(report.seconds, 1),
    }


def worst(cycles: Sequence[Cycle], metric: str) -> float | None:
    """The largest value of a run metric over the cycles that have it."""
    return max((c.metrics[metric] for c in cycles if metric in c.metrics), default=None)


def as_json(report: Report) -> dict[str, object]:
    """The whole report, with what is derived from it."""
    families = {
        family: {
            "before": asdict(rate_of(report.before.of_family(family))),
            "after": asdict(rate_of(report.after.of_family(family))),
            "gain": asdict(report.gain(family)),
        }
        for family in report.families
    }
    return {
        "summary": summary(report),
        "bars": [asdict(bar) for bar in bars(report)],
        "gain": asdict(report.gain()),
        "families": families,
        **asdict(report),
    }
