"""`m1serve bench parity`: the report as JSON, and refusals that say what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from m1serve.cli.app import app
from m1serve.errors import ConfigError
from m1serve.model.slice import SLICE_VOCAB
from m1serve.model.tiny import tiny_config


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["bench", "parity", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_nano_agrees_and_the_file_says_how_it_was_made(tmp_path: Path) -> None:
    out = tmp_path / "parity.json"
    assert run("--device", "cpu", "--rows", "2", "--tokens", "24", "--out", str(out)) == ""
    report = json.loads(out.read_text())
    assert {"command", "device", "torch", "dtype"} <= report.keys()
    assert report["num_tokens"] == 48
    assert report["fp32_head"]["r"] >= 0.9999
    assert report["fp32_head"]["mean_abs_dlogp"] <= 1e-5
    assert len(report["layers"]) == 8
    assert sum(layer["flip_rate"] for layer in report["layers"]) == 0


def test_a_model_directory_in_bf16_disagrees_by_more(tmp_path: Path) -> None:
    import m1serve.model

    nano = Path(m1serve.model.__path__[0]) / "nano"
    said = run(
        *("--model", str(nano), "--device", "cpu", "--dtype", "bfloat16"),
        *("--rows", "1", "--tokens", "16", "--chunk", "100"),
    )
    report = json.loads(said)
    assert report["dtype"] == "bfloat16"
    assert report["layers"][-1]["decode_error"] > 1e-4


def test_what_one_token_cannot_tell_is_null() -> None:
    """Strict readers of JSON take no NaN, and nothing was decoded behind the prompt."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    said = run("--device", "cpu", "--rows", "1", "--tokens", "1")
    report = json.loads(said, parse_constant=refuse)
    assert report["fp32_head"]["r"] is None
    assert report["fp32_head"]["mean_abs_dlogp"] <= 1e-5
    assert {layer["decode_error"] for layer in report["layers"]} == {None}
    assert all(layer["prefill_error"] < 1e-5 for layer in report["layers"])


def test_a_slice_is_made_of_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven lightning layers and a softmax layer, here of tiny widths."""
    monkeypatch.setattr("m1serve.model.slice.slice_config", lambda: tiny_config(SLICE_VOCAB))
    arguments = ("--model", "slice", "--device", "cpu", "--rows", "2", "--tokens", "8")
    reports = [
        json.loads(run(*arguments, "--prompt-tokens", "40", "--chunk", "16", *more))
        for more in ((), ("--head-scale", "1"))
    ]
    assert [layer["kind"] for layer in reports[0]["layers"]] == ["lightning"] * 7 + ["softmax"]
    assert (reports[0]["prompt_tokens"], reports[1]["head_scale"]) == (40, 1)
    assert reports[0]["fp32_head"]["mean_abs_dlogp"] <= 1e-5
    assert reports[0]["entropy"] < reports[1]["entropy"] - 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "tpu"), "--device must be one of auto, cpu, cuda, got 'tpu'"),
        (("--dtype", "int8"), "--dtype must be one of auto, bfloat16, float32, got 'int8'"),
        (("--model", "no-such"), "no-such is neither nano, slice nor a directory"),
        (("--out", "no-such/parity.json"), "no-such is no directory; make it first"),
    ],
)
def test_bad_options_are_refused(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(*arguments)
