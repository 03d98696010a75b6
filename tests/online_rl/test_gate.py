"""The gate's decision table: poison is refused, noise passes."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from m1serve.config import GateSettings
from m1serve.online_rl.gate import EpisodeResult, SuiteResult, decide

NUM = 24
PARENT = {"lookup": 12, "calc": 13, "refund": 16, "sums": 4}
SETTINGS = GateSettings()


def suite(
    successes: Mapping[str, int],
    *,
    well_formed: float = 1.0,
    kl: float | None = 0.01,
    unscored: int = 0,
    shift: int = 0,
) -> SuiteResult:
    """The first tasks of each family are solved, rotated by `shift`; the first few are unscored."""
    episodes = [
        EpisodeResult(
            task_id=f"{family}/gate/{i}",
            family=family,
            is_solved=None if i < unscored else (i + shift) % NUM < count,
            num_turns=10,
            num_well_formed=round(10 * well_formed),
        )
        for family, count in successes.items()
        for i in range(NUM)
    ]
    return SuiteResult(weights_version="nano@1", episodes=tuple(episodes), kl=kl)


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        (suite(PARENT), None),
        (suite({"lookup": 20, "calc": 22, "refund": 20, "sums": 5}), None),
        # one episode more or less in each family, and another set of tasks solved
        (suite({"lookup": 11, "calc": 14, "refund": 15, "sums": 4}, shift=1), None),
        (suite({"lookup": 20, "calc": 22, "refund": 14, "sums": 4}), None),
        # collapse, as a learning rate of 3e-4 gives
        (suite({"lookup": 1, "calc": 2, "refund": 1, "sums": 0}), "overall success fell"),
        # overall better, one family lost
        (suite({"lookup": 22, "calc": 22, "refund": 8, "sums": 8}), "refund fell from 0.667"),
        (suite(PARENT, well_formed=0.7), "well formed"),
        (suite(PARENT, kl=0.6), "KL to the parent"),
        (suite(PARENT, kl=float("nan")), "KL to the parent"),
        (suite(PARENT, kl=None), "KL to the parent"),
        (suite(PARENT, unscored=3), "could not be scored"),
    ],
)
def test_decision_table(candidate: SuiteResult, reason: str | None) -> None:
    decision = decide(suite(PARENT, kl=None), candidate, SETTINGS)
    assert decision.is_passed is (reason is None), decision.reasons
    if reason is not None:
        assert reason in "; ".join(decision.reasons)


def test_table_has_the_total_and_each_family() -> None:
    decision = decide(suite(PARENT), suite(PARENT | {"calc": 20}), SETTINGS)
    rows = {row.family: row for row in decision.table}
    assert list(rows) == ["all", "calc", "lookup", "refund", "sums"]
    assert rows["all"].num == 4 * NUM
    assert rows["calc"].parent == pytest.approx(13 / 24)
    assert rows["calc"].candidate == pytest.approx(20 / 24)
    assert rows["calc"].z > 2
    assert rows["refund"].z == 0


def test_unscored_pairs_are_left_out_on_both_sides() -> None:
    decision = decide(suite(PARENT, unscored=2), suite(PARENT), SETTINGS)
    assert {row.num for row in decision.table} == {4 * (NUM - 2), NUM - 2}
    assert decision.is_passed


def test_a_total_collapse_has_infinite_z() -> None:
    decision = decide(suite({"calc": 24}), suite({"calc": 0}), SETTINGS)
    assert decision.table[1].z == float("-inf")
    assert not decision.is_passed


def test_other_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="different tasks"):
        decide(suite(PARENT), suite({"lookup": 12}), SETTINGS)


def drawn(rng: random.Random, rates: Mapping[str, float]) -> SuiteResult:
    episodes = [
        EpisodeResult(
            task_id=f"{family}/gate/{i}",
            family=family,
            is_solved=rng.random() < rate,
            num_turns=2,
            num_well_formed=2,
        )
        for family, rate in rates.items()
        for i in range(NUM)
    ]
    return SuiteResult(weights_version="nano@1", episodes=tuple(episodes), kl=0.01)


def test_a_typical_gain_passes_and_a_poisoned_candidate_never_does() -> None:
    rng = random.Random(0)
    before = {"lookup": 0.5, "calc": 0.55, "cancel": 0.55, "compare": 0.45, "refund": 0.6}
    after = {"lookup": 0.9, "calc": 0.9, "cancel": 0.8, "compare": 0.6, "refund": 0.75}
    poisoned = dict.fromkeys(before, 0.1)
    passed = [decide(drawn(rng, before), drawn(rng, after), SETTINGS) for _ in range(100)]
    refused = [decide(drawn(rng, before), drawn(rng, poisoned), SETTINGS) for _ in range(100)]
    assert sum(d.is_passed for d in passed) >= 98
    assert not any(d.is_passed for d in refused)
