"""The settings tree: precedence, refusals and what the messages say."""

from pathlib import Path

import pytest

from m1serve.config import load_settings
from m1serve.errors import ConfigError


def test_flags_win_over_environment_and_environment_over_toml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "m1serve.toml"
    file.write_text("[train]\nlr = 1e-3\nminibatches = 2\nweight_max = 9.0\n")
    monkeypatch.setenv("M1SERVE_CONFIG", str(file))
    monkeypatch.setenv("M1SERVE_TRAIN__MINIBATCHES", "3")
    settings = load_settings(train={"weight_max": 4.0})
    assert settings.train.lr == 1e-3
    assert settings.train.minibatches == 3
    assert settings.train.weight_max == 4.0


def test_an_unknown_key_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m1serve.toml"
    file.write_text("[train]\nlearning_rate = 1e-3\n")
    monkeypatch.setenv("M1SERVE_CONFIG", str(file))
    with pytest.raises(ConfigError, match=r"train\.learning_rate"):
        load_settings()


def test_an_unknown_environment_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M1SERVE_TRAINER__LR", "1")
    with pytest.raises(ConfigError, match="M1SERVE_TRAINER__LR"):
        load_settings()


def test_a_value_out_of_range_says_what_was_got() -> None:
    with pytest.raises(ConfigError, match=r"serve\.port.*got 99999"):
        load_settings(serve={"port": 99999})


def test_a_missing_settings_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no settings file"):
        load_settings(tmp_path / "absent.toml")


def test_settings_are_frozen() -> None:
    settings = load_settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.train.lr = 1.0  # type: ignore[misc]


def test_a_relative_home_gives_an_absolute_database_url(tmp_path: Path) -> None:
    settings = load_settings(home=tmp_path / "data")
    assert settings.database == f"sqlite:///{tmp_path}/data/m1serve.db"
