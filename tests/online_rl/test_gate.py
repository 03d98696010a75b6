"""The gate's decision table: poison is refused, noise passes, doubt is looked at twice."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

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
        (suite({"lookup": 22, "calc": 22, "refund": 6, "sums": 8}), "refund fell from 0.667"),
        (suite(PARENT, well_formed=0.7), "well formed"),
        (suite(PARENT, kl=0.6), "KL to the parent"),
        (suite(PARENT, kl=float("nan")), "KL to the parent"),
        (suite(PARENT, kl=None), "KL to the parent"),
        (suite(PARENT, unscored=3), "12 of 96 episodes of nano@1 could not be scored"),
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


def test_a_parent_without_verdicts_proves_nothing() -> None:
    decision = decide(suite(PARENT, unscored=NUM), suite({"lookup": 0} | PARENT), SETTINGS)
    assert not decision.is_passed
    assert "96 of 96 episodes of nano@1 could not be scored" in decision.reasons


def test_the_total_is_the_mean_of_the_families_however_many_tasks_each_has() -> None:
    parent, candidate = suite({"calc": 12, "sums": 12}), suite({"calc": 12, "sums": 0})
    more = suite({"sums": 12}), suite({"sums": 0})
    renamed = [replace(m, episodes=tuple(map(again, m.episodes))) for m in more]
    table = decide(parent.joined(renamed[0]), candidate.joined(renamed[1]), SETTINGS).table
    assert [(row.family, row.num) for row in table] == [("all", 72), ("calc", 24), ("sums", 48)]
    assert (table[0].parent, table[0].candidate) == (0.5, 0.25)
    assert table[0].standard_error == pytest.approx(table[2].standard_error / 2)


def again(episode: EpisodeResult) -> EpisodeResult:
    return replace(episode, task_id=f"{episode.task_id}-again")


@pytest.mark.parametrize(
    ("candidate", "doubtful"),
    [
        (suite(PARENT), ()),
        (suite(PARENT | {"calc": 11}), ()),
        # two standard errors, as one family of eight shows by luck in every sixth run
        (suite(PARENT | {"calc": 9, "lookup": 16}), ("calc",)),
        # overall worse by more than max_drop
        (suite(PARENT | {"calc": 9, "lookup": 8}), tuple(sorted(PARENT))),
        # so clear, or refused for another reason, that no more tasks are worth their time
        (suite({"lookup": 1, "calc": 2, "refund": 1, "sums": 0}), ()),
        (suite(PARENT | {"calc": 9, "lookup": 16}, kl=0.6), ()),
    ],
)
def test_what_seems_worse_is_doubtful(candidate: SuiteResult, doubtful: tuple[str, ...]) -> None:
    assert decide(suite(PARENT), candidate, SETTINGS).doubtful == doubtful


START = {
    "lookup": 0.5,
    "calc": 0.55,
    "cancel": 0.55,
    "compare": 0.45,
    "refund": 0.6,
    "sums": 0.15,
    "aiw": 0.4,
    "gcd": 0.4,
}


def drawn(rng: random.Random, rates: Mapping[str, float], start: int, stop: int) -> SuiteResult:
    """Every episode by a chance of its own: as far apart as two versions of one skill can be."""
    episodes = [
        EpisodeResult(
            task_id=f"{family}/gate/{i}",
            family=family,
            is_solved=rng.random() < rate,
            num_turns=2,
            num_well_formed=2,
        )
        for family, rate in rates.items()
        for i in range(start, stop)
    ]
    return SuiteResult(weights_version="nano@1", episodes=tuple(episodes), kl=0.01)


def is_passed(rng: random.Random, before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    first = drawn(rng, before, 0, NUM), drawn(rng, after, 0, NUM)
    decision = decide(*first, SETTINGS)
    if decision.doubtful:
        more = [
            drawn(rng, {f: rates[f] for f in decision.doubtful}, NUM, 3 * NUM)
            for rates in (before, after)
        ]
        decision = decide(first[0].joined(more[0]), first[1].joined(more[1]), SETTINGS)
    return decision.is_passed


@pytest.mark.parametrize(
    ("changes", "least", "most"),
    [
        # nothing changed; one look at 2 standard errors would refuse 25 to 30%
        ({}, 0.94, 1.0),
        # a typical step
        ({"lookup": 0.9, "calc": 0.9, "cancel": 0.8, "compare": 0.6, "refund": 0.75}, 0.99, 1.0),
        # one family lost; one look at 3 standard errors would pass 45%
        ({"lookup": 0.6, "refund": 0.15}, 0.0, 0.15),
        (dict.fromkeys(START, 0.1), 0.0, 0.0),
    ],
)
def test_chance_alone_rarely_refuses_and_never_hides_a_loss(
    changes: Mapping[str, float], least: float, most: float
) -> None:
    rng = random.Random(0)
    passed = sum(is_passed(rng, START, START | changes) for _ in range(200)) / 200
    assert least <= passed <= most
