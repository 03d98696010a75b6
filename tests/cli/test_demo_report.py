"""The demo's bars, numbers, tables and plot, from made-up outcomes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from m1serve.cli.demo_plot import write_plot
from m1serve.cli.demo_report import Cycle, Evaluation, Report, as_json, bars, summary
from m1serve.cli.demo_tables import print_report, transcript


def evaluation(
    label: str, version: str, num_lookup: int, num_sums: int, *, num_unscored: int = 0
) -> Evaluation:
    lookup = {f"lookup/report/{i}": i < num_lookup for i in range(60)}
    sums = {f"sums/report/{i}": i < num_sums for i in range(60 - num_unscored)}
    return Evaluation(
        label=label,
        weights_version=version,
        successes=lookup | sums,
        unscored=tuple(f"sums/report/{59 - i}" for i in range(num_unscored)),
    )


def cycle(number: int, *, outcome: str = "promoted") -> Cycle:
    is_promoted = outcome == "promoted"
    return Cycle(
        number=number,
        run_id=f"r{number}",
        outcome=outcome,
        reason="" if is_promoted else "gate: success fell",
        parent_version=f"nano@{number}",
        weights_version=f"nano@{number + 1}" if is_promoted else f"nano@{number}",
        num_episodes=200,
        success=0.5,
        num_tokens=10_000,
        metrics={"mismatch_kl": 1e-9 * (number + 1), "fork_weight_p95": 1.1, "weight_p50": 1.0},
        swap_ms=20.0 + number if is_promoted else None,
        seconds={"play": 12.0, "score": 1.0, "train": 20.0},
    )


GOOD = Report(
    before=evaluation("before", "nano@0", 20, 24),
    after=evaluation("after", "nano@10", 50, 30),
    cycles=tuple(cycle(n) for n in range(10)),
    poisoned=cycle(10, outcome="rejected"),
    num_requests=6000,
    failures=(),
    num_trajectories=2400,
    num_tokens=100_000,
    num_restarts=0,
    seconds=500.0,
    is_small=False,
)


def missed(report: Report) -> list[str]:
    return [bar.text for bar in bars(report) if not bar.is_met]


def test_a_good_demo_holds_every_bar() -> None:
    assert missed(GOOD) == []
    assert summary(GOOD)["held"] is True


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"after": evaluation("after", "nano@10", 30, 30)}, "gain +0.133 >= 0.2"),
        (
            {"after": evaluation("after", "nano@10", 60, 10)},
            "families worse beyond noise (97.5% each, 95% together): sums",
        ),
        ({"failures": ("APITimeoutError: late",)}, "failed requests 1 = 0"),
        ({"num_trajectories": 1499}, "trajectories 1499 >= 1500"),
        ({"seconds": 721.0}, "seconds 721 <= 720"),
        ({"poisoned": cycle(10)}, "poisoned candidate refused: promoted, "),
        ({"poisoned": cycle(10, outcome="failed")}, "poisoned candidate refused: failed"),
        (
            {"poisoned": replace(cycle(10, outcome="rejected"), reason="verification: nan")},
            "poisoned candidate refused: rejected, verification",
        ),
        (
            {"before": evaluation("before", "nano@0", 20, 24, num_unscored=3)},
            "held-out episodes without a verdict 3 of 240 <= 1%",
        ),
        ({"cycles": (*(cycle(n) for n in range(9)), cycle(9, outcome="failed"))}, "failed runs 1"),
        ({"num_restarts": 1}, "process restarts 1 = 0"),
    ],
)
def test_each_bar_can_be_missed(change: dict[str, object], missing: str) -> None:
    report = replace(GOOD, **change)  # type: ignore[arg-type]
    assert any(text.startswith(missing) for text in missed(report)), missed(report)
    assert summary(report)["held"] is False


def test_eight_families_are_eight_chances_of_bad_luck() -> None:
    """A family that only one interval of 95% would call worse is no alarm."""
    names = [f"f{i}" for i in range(8)]

    def of(label: str, num_unlucky: int) -> Evaluation:
        solved = {f"{name}/report/{i}": i < 30 for name in names[1:] for i in range(60)}
        unlucky = {f"f0/report/{i}": i < num_unlucky for i in range(60)}
        return Evaluation(label=label, weights_version="nano@0", successes=unlucky | solved)

    report = replace(GOOD, before=of("before", 30), after=of("after", 25))
    assert report.family_level == pytest.approx(0.99375)
    assert report.gain("f0").high < 0 <= report.gain("f0", level=report.family_level).high
    (bar,) = (bar for bar in bars(report) if bar.text.startswith("families worse"))
    assert bar.is_met
    assert bar.text == "families worse beyond noise (99.4% each, 95% together): none"


def test_what_has_no_verdict_is_no_failure() -> None:
    """An unscored task is left out on both sides of the gain, and of the rate."""
    report = replace(GOOD, before=evaluation("before", "nano@0", 20, 24, num_unscored=1))
    assert missed(report) == []
    assert report.before.rate.value == pytest.approx(44 / 119)
    assert report.gain("sums").value == pytest.approx(6 / 59)


def test_a_small_demo_asks_for_the_mechanism_only() -> None:
    same = replace(GOOD, after=GOOD.before, num_trajectories=60, is_small=True)
    assert missed(same) == []
    stuck = replace(same, cycles=(cycle(0, outcome="rejected"),))
    assert missed(stuck) == ["versions promoted 0 >= 1"]


def test_the_last_line_carries_what_scripts_read() -> None:
    line = summary(GOOD)
    assert line["before"] == pytest.approx(44 / 120, abs=1e-4)
    assert line["after"] == pytest.approx(80 / 120, abs=1e-4)
    assert line["versions"] == 10
    assert line["mismatch_kl"] == pytest.approx(1e-8)
    assert line["swap_ms"] == 24.5
    assert {"delta_ci_low", "failed_requests", "trajectories", "seconds"} <= line.keys()


def test_the_report_is_plain_json() -> None:
    whole = json.loads(json.dumps(as_json(GOOD)))
    assert whole["families"]["lookup"]["gain"]["value"] == pytest.approx(0.5)
    assert len(whole["bars"]) == len(bars(GOOD))


def test_tables_and_plot_are_written(tmp_path: Path) -> None:
    console = Console(record=True, width=160, file=(tmp_path / "out").open("w"))
    with console.file:
        print_report(console, GOOD)
    text = console.export_text()
    assert "lookup" in text
    assert "nano@10" in text
    assert "MISSED" not in text
    write_plot(GOOD, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").stat().st_size > 10_000


def test_a_transcript_reads_as_a_dialogue() -> None:
    call = {"id": "1", "function": {"name": "get_order", "arguments": '{"order_id": 7728}'}}
    text = transcript(
        [
            {"role": "system", "content": "policy"},
            {"role": "user", "content": "where is 7728?"},
            {"role": "assistant", "reasoning_content": "look\nit up", "tool_calls": [call]},
            {"role": "tool", "content": '{"status": "shipped"}'},
            {"role": "assistant", "content": "It is shipped."},
        ]
    )
    assert text.splitlines() == [
        "user: where is 7728?",
        "assistant: <think> look it up </think> -> get_order(order_id=7728)",
        'tool: {"status": "shipped"}',
        "assistant: It is shipped.",
    ]
