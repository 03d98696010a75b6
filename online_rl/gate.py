"""May a candidate serve? A pure decision over held-out tasks that it and its parent played.

Two looks: what seems worse after the first is played on more tasks, and only then refused. One look
at 24 tasks in each of 8 families either refuses a quarter of all unchanged candidates (2 standard
errors) or misses most families that were lost (3); see "Two looks of the gate" in DECISIONS.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from m1serve.config import GateSettings

MAX_UNSCORED_SHARE = 0.1
"""More episodes without a reward than this, and the suite says nothing."""
DOUBT_Z = 1.5
"""A family that is worse by more standard errors than this is looked at again."""
OVERALL_Z = 2.0
"""The overall fall must be beyond its noise, too: `max_drop` of few tasks is one standard error."""
SURE_Z = 4.0
"""An overall fall this clear needs no second look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    task_id: str
    family: str
    is_solved: bool | None
    """None when the scorer could not tell."""
    num_turns: int
    num_well_formed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResult:
    weights_version: str
    episodes: tuple[EpisodeResult, ...]
    kl: float | None = None
    """Of a candidate: mean per-token KL to its parent on its own samples; None is unmeasured."""

    @property
    def format_rate(self) -> float:
        """Well-formed turns; 0 when nothing was said."""
        num_turns = sum(e.num_turns for e in self.episodes)
        return sum(e.num_well_formed for e in self.episodes) / num_turns if num_turns else 0.0

    @property
    def is_measured(self) -> bool:
        """Nearly every episode has a reward."""
        num = sum(e.is_solved is None for e in self.episodes)
        return bool(self.episodes) and num <= MAX_UNSCORED_SHARE * len(self.episodes)

    def joined(self, more: SuiteResult) -> SuiteResult:
        """With the episodes of a second look; the KL stays that of the first."""
        return replace(self, episodes=self.episodes + more.episodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRow:
    """Success on the tasks that both versions have a result for."""

    family: str
    num: int
    parent: float
    candidate: float
    standard_error: float
    """Of candidate − parent, over pairs of the same task."""

    @property
    def difference(self) -> float:
        return self.candidate - self.parent

    @property
    def z(self) -> float:
        """Standard errors by which the candidate is better; ±inf when every pair changed alike."""
        if self.standard_error > 0:
            return self.difference / self.standard_error
        return math.copysign(math.inf, self.difference) if self.difference else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GateDecision:
    is_passed: bool
    reasons: tuple[str, ...]
    """Every limit that was broken; empty when passed."""
    table: tuple[FamilyRow, ...]
    """'all' first (the mean of the families, however many tasks each has), then each family."""
    doubtful: tuple[str, ...]
    """Families that may have become worse: to be played on more tasks before this decision counts.
    Empty when it is clear.
    """


def decide(parent: SuiteResult, candidate: SuiteResult, settings: GateSettings) -> GateDecision:
    """Passed when no limit is broken. What could not be measured fails."""
    before = {e.task_id: e for e in parent.episodes}
    if before.keys() != {e.task_id for e in candidate.episodes}:
        raise ValueError("parent and candidate played different tasks; a gate compares the same")
    pairs = [(before[e.task_id], e) for e in candidate.episodes]
    table = _table(pairs)
    final = [
        *_unscored_reasons(parent, candidate),
        *_behaviour_reasons(parent, candidate, settings),
    ]
    reasons = [*final, *_drop_reasons(table, settings)]
    return GateDecision(
        is_passed=not reasons,
        reasons=tuple(reasons),
        table=table,
        doubtful=() if final else _doubtful(table, settings),
    )


Pair = tuple[EpisodeResult, EpisodeResult]


def _table(pairs: Sequence[Pair]) -> tuple[FamilyRow, ...]:
    scored = [p for p in pairs if p[0].is_solved is not None and p[1].is_solved is not None]
    by_family: dict[str, list[Pair]] = {}
    for pair in scored:
        by_family.setdefault(pair[1].family, []).append(pair)
    rows = tuple(_row(f, part) for f, part in sorted(by_family.items()))
    return (_mean_row(rows), *rows)


def _mean_row(rows: Sequence[FamilyRow]) -> FamilyRow:
    num = len(rows)
    return FamilyRow(
        family="all",
        num=sum(r.num for r in rows),
        parent=sum(r.parent for r in rows) / num if num else 0.0,
        candidate=sum(r.candidate for r in rows) / num if num else 0.0,
        standard_error=math.sqrt(sum(r.standard_error**2 for r in rows)) / num if num else 0.0,
    )


def _row(family: str, pairs: Sequence[Pair]) -> FamilyRow:
    num = len(pairs)
    changes = [float(bool(c.is_solved)) - float(bool(p.is_solved)) for p, c in pairs]
    mean = sum(changes) / num
    variance = sum((x - mean) ** 2 for x in changes) / (num - 1) if num > 1 else 0.0
    return FamilyRow(
        family=family,
        num=num,
        parent=sum(bool(p.is_solved) for p, _ in pairs) / num,
        candidate=sum(bool(c.is_solved) for _, c in pairs) / num,
        standard_error=math.sqrt(variance / num),
    )


def _unscored_reasons(*results: SuiteResult) -> list[str]:
    return [
        f"{sum(e.is_solved is None for e in result.episodes)} of {len(result.episodes)} episodes "
        f"of {result.weights_version} could not be scored"
        for result in results
        if not result.is_measured
    ]


def _drop_reasons(table: Sequence[FamilyRow], settings: GateSettings) -> list[str]:
    overall, *families = table
    reasons = []
    if overall.difference < -settings.max_drop and overall.z < -OVERALL_Z:
        reasons.append(
            f"overall success fell from {overall.parent:.3f} to {overall.candidate:.3f} on "
            f"{overall.num} tasks, {-overall.z:.1f} standard errors (max_drop {settings.max_drop})"
        )
    reasons += [
        f"{row.family} fell from {row.parent:.3f} to {row.candidate:.3f} on {row.num} tasks, "
        f"{-row.z:.1f} standard errors (family_z {settings.family_z})"
        for row in families
        if row.z < -settings.family_z
    ]
    return reasons


def _doubtful(table: Sequence[FamilyRow], settings: GateSettings) -> tuple[str, ...]:
    overall, *families = table
    if overall.difference < -settings.max_drop:
        return () if overall.z < -SURE_Z else tuple(row.family for row in families)
    return tuple(row.family for row in families if row.z < -DOUBT_Z)


def _behaviour_reasons(
    parent: SuiteResult, candidate: SuiteResult, settings: GateSettings
) -> list[str]:
    reasons = []
    kl = math.nan if candidate.kl is None else candidate.kl
    if candidate.format_rate < settings.min_format_rate * parent.format_rate:
        reasons.append(
            f"{candidate.format_rate:.3f} of the turns are well formed, {parent.format_rate:.3f} "
            f"of the parent's (min_format_rate {settings.min_format_rate})"
        )
    # written so that nan fails
    if not kl <= settings.max_kl:
        reasons.append(f"KL to the parent is {kl:.3f} a token (max_kl {settings.max_kl})")
    return reasons
