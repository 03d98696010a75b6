"""`m1serve cost` as a user meets it: tables, JSON, a plot, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from m1serve.cli.app import app
from m1serve.cost.minimax import M1, SLICE
from m1serve.errors import ConfigError, WeightsError

PNG = b"\x89PNG"


def run_cost(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["cost", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def facts_of(*arguments: str) -> Any:
    return json.loads(run_cost("--json", *arguments))


def test_the_tables_name_figures_assumptions_and_conventions() -> None:
    page = run_cost()
    for text in (
        "│ 100,000   │          127.5 │   573.0 │  1,772.3 │",
        "0.344 (0.120) │          0.292 │",
        "MFU 40%",
        "bandwidth 70%",
        "3.00 $ a GPU-hour",
        "258,048 GPU-hours",
        "1 MAC = 2 FLOPs",
        "141 GB, 4.8 TB/s, 989 TFLOP/s",
        "29% there and 24% at 128K",
        "nothing on this page was measured",
    ):
        assert text in page


def test_json_holds_everything_that_the_tables_show() -> None:
    facts = facts_of("--model", "slice", "--weight-bits", "16", "--gpus", "1", "--price", "2")
    assert facts["shapes"][0]["name"] == "M1's slice"
    assert facts["question"]["config"]["num_hidden_layers"] == SLICE.num_hidden_layers == 8
    assert facts["question"]["machine"]["price_per_gpu_hour"] == 2
    assert facts["shapes"][0]["weight_bytes"] == pytest.approx(91e9, rel=0.01)
    assert facts["serving"][0]["timing"]["dollars"] > 0
    assert facts["serving"][1]["timing"] is None
    assert len(facts["figure"]["tokens"]) == 17
    assert facts["conventions"]


def test_any_model_directory_will_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(M1.to_dict()))
    for where in (tmp_path, tmp_path / "config.json"):
        assert (
            facts_of("--model", str(where))["lengths"][0]["prefill_token_ratio"]
            == (facts_of()["lengths"][0]["prefill_token_ratio"])
        )


def test_a_directory_that_is_named_as_a_rival_is_told_apart(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-235B-A22B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(M1.to_dict()))
    facts = facts_of("--model", str(folder))
    assert len({shape["name"] for shape in facts["shapes"]}) == 4
    asked = facts["lengths"][0]["token_flops"][facts["shapes"][0]["name"]]
    assert asked == facts_of()["lengths"][0]["token_flops"]["MiniMax-M1"]


def test_nanos_small_figures_are_not_rounded_to_nothing() -> None:
    page = run_cost("--model", "nano")
    # 8.91 M linear, 0.29 M lightning and 1,024 a key
    assert " 0.026 " in page
    assert "7.06 M" in page


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    run_cost("--plot", str(path))
    assert path.read_bytes().startswith(PNG)
    assert path.stat().st_size < 100_000


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--gpu", "a100"), "no GPU 'a100' here; wanted one of h200, h800, h20"),
        (("--weight-bits", "4"), "--weight-bits is 4; wanted 8 or 16"),
        (("--kv-bits", "0"), "--kv-bits is 0; wanted 8 or 16"),
        (("--mfu", "0"), "mfu is 0.0; wanted a share"),
        (("--output-tokens", "0"), "wanted at least 1"),
        (("--plot", "no/such/folder/a.png"), "wanted a .png in a directory that exists"),
        (("--plot", "a.mp3"), "wanted a .png in a directory that exists"),
    ],
)
def test_what_cannot_be_computed_is_refused(arguments: tuple[str, ...], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted.replace("(", r"\(")):
        run_cost(*arguments)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="is it a model directory"):
        run_cost("--model", str(tmp_path))
