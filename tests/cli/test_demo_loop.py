"""What the demo takes from the store, and what it clears away before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from m1serve.cli.demo_ledger import Outcome, success_rate
from m1serve.cli.demo_loop import as_evaluation
from m1serve.cli.demo_product import fresh_home
from m1serve.errors import ConfigError, StoreError
from m1serve.types import RewardStatus


def outcome(reward: float | None, *, versions: tuple[int, int] = (3, 3)) -> Outcome:
    status = RewardStatus.TIMEOUT if reward is None else RewardStatus.OK
    return Outcome(reward=reward, status=status, versions=versions)


def test_a_reward_that_could_not_be_computed_is_no_failure() -> None:
    results = {"a/report/0": outcome(1.0), "a/report/1": outcome(0.0), "a/report/2": outcome(None)}
    evaluation = as_evaluation("before", "nano@3", results)
    assert evaluation.successes == {"a/report/0": True, "a/report/1": False}
    assert evaluation.unscored == ("a/report/2",)
    assert success_rate(results.values()) == 0.5
    assert success_rate([outcome(None)]) == 0.0


@pytest.mark.parametrize("versions", [(2, 3), (3, 4), (4, 4)])
def test_answers_of_other_weights_are_no_measurement(versions: tuple[int, int]) -> None:
    results = {"a/report/0": outcome(1.0), "a/report/1": outcome(1.0, versions=versions)}
    with pytest.raises(StoreError, match=r"1 of 2 held-out episodes .* nano@3 alone, a/report/1"):
        as_evaluation("after", "nano@3", results)


def test_a_home_of_an_earlier_demo_is_emptied(tmp_path: Path) -> None:
    home = tmp_path / "home"
    fresh_home(home)
    (home / "run").mkdir()
    (home / "run" / "up.lock").write_text("")
    (home / "m1serve.db").write_text("")
    fresh_home(home)
    assert list(home.iterdir()) == []


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    """As `m1serve demo --out /` would meet."""
    file = tmp_path / "home" / "me" / "thesis.tex"
    file.parent.mkdir(parents=True)
    file.write_text("years of work")
    with pytest.raises(ConfigError, match="was not made by `m1serve demo`"):
        fresh_home(tmp_path / "home")
    assert file.read_text() == "years of work"
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["me"]
