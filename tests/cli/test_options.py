"""How flags become settings, and settings the environment of a child process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from m1serve.cli.options import parse_override, read_settings, settings_environment, settings_tree
from m1serve.config import load_settings
from m1serve.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("M1SERVE_CONFIG", raising=False)


def test_values_are_json_where_they_can_be() -> None:
    assert parse_override("train.lr=1e-4") == (["train", "lr"], 1e-4)
    assert parse_override("serve.with_ray=false") == (["serve", "with_ray"], False)
    assert parse_override('gate.families=["lookup"]') == (["gate", "families"], ["lookup"])
    assert parse_override("model.model_id=m=1") == (["model", "model_id"], "m=1")


@pytest.mark.parametrize("text", ["train.lr", "=3", " =3"])
def test_an_override_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        parse_override(text)


def test_a_later_override_wins() -> None:
    pairs = [parse_override(t) for t in ("train.lr=1", "train.seed=2", "train.lr=3")]
    assert settings_tree(pairs) == {"train": {"lr": 3, "seed": 2}}


def test_a_section_cannot_be_a_value_too() -> None:
    with pytest.raises(ConfigError, match="train was already given"):
        settings_tree([parse_override("train=1"), parse_override("train.lr=3")])


def test_named_options_win_over_set_and_file(tmp_path: Path) -> None:
    toml = tmp_path / "m1serve.toml"
    toml.write_text("[serve]\nport = 9000\nadmin_port = 9001\n[train]\nlr = 3e-5\n")
    settings = read_settings(config=toml, overrides=["serve.port=9100"], admin_port=9201)
    assert settings.serve.port == 9100
    assert settings.serve.admin_port == 9201
    assert settings.train.lr == 3e-5


@pytest.mark.parametrize("text", ["train.learning_rate=1", "trian.lr=1", "serve.port=0"])
def test_unknown_keys_and_bad_values_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=text.partition("=")[0].split(".")[0]):
        read_settings(overrides=[text])


def test_paths_become_absolute(tmp_path: Path) -> None:
    settings = read_settings(
        home=Path("h"), model=Path("m"), overrides=["database_url=sqlite:///db/x.db"]
    )
    assert settings.home == tmp_path / "h"
    assert settings.model.path == tmp_path / "m"
    assert settings.database == f"sqlite:///{tmp_path}/db/x.db"


def test_a_child_reads_the_same_settings_from_its_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("M1SERVE_TRAIN__LR", "1e-3")
    settings = read_settings(
        home=tmp_path / "h",
        overrides=['model.aliases=["a", "b"]', "train.seed=7", "gate.max_kl=0.25"],
        no_ray=True,
    )
    environment = settings_environment(settings)
    assert json.loads(environment["M1SERVE_TRAIN"])["lr"] == 1e-3
    monkeypatch.delenv("M1SERVE_TRAIN__LR")
    for name, value in environment.items():
        if name.startswith("M1SERVE_"):
            monkeypatch.setenv(name, value)
    assert load_settings() == settings
