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


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        ({"serve": {"prot": 1}}, r"serve\.prot is no setting; did you mean port\?"),
        ({"trian": {"lr": 1}}, r"trian is no setting; did you mean train\?"),
        ({"gate": {"xyzzy": 1}}, r"gate\.xyzzy is no setting; gate has .*max_turn_tokens"),
    ],
)
def test_an_unknown_key_comes_with_the_one_that_was_meant(
    flags: dict[str, object], advice: str
) -> None:
    with pytest.raises(ConfigError, match=advice):
        load_settings(**flags)


def test_an_unknown_environment_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M1SERVE_TRAINER__LR", "1")
    with pytest.raises(ConfigError, match="M1SERVE_TRAINER__LR"):
        load_settings()


def test_a_value_out_of_range_says_what_was_got() -> None:
    with pytest.raises(ConfigError, match=r"serve\.port.*got 99999"):
        load_settings(serve={"port": 99999})


KEY = "a" * 64


@pytest.mark.parametrize(
    ("serve", "missing"),
    [
        ({"host": "0.0.0.0"}, "serve.api_keys and serve.admin_key"),
        ({"host": "::", "api_keys": [KEY]}, "serve.admin_key"),
        ({"host": "gpu-7.example", "admin_key": KEY}, "serve.api_keys"),
        ({"host": "0.0.0.0", "keys": [{"sha256": KEY}]}, "serve.admin_key"),
    ],
)
def test_nobody_outside_this_machine_is_served_without_keys(
    serve: dict[str, object], missing: str
) -> None:
    with pytest.raises(ConfigError, match=f"reachable from other machines.* {missing} "):
        load_settings(serve=serve)


@pytest.mark.parametrize(
    "serve",
    [
        {"host": "localhost"},
        {"host": "127.0.0.2"},
        {"host": "::1"},
        {"host": "0.0.0.0", "api_keys": [KEY], "admin_key": KEY.upper()},
        {"host": "0.0.0.0", "keys": [{"sha256": KEY, "scopes": ["infer", "admin"]}]},
    ],
)
def test_loopback_needs_no_keys_and_keys_open_the_rest(serve: dict[str, object]) -> None:
    assert load_settings(serve=serve).serve.host == serve["host"]


@pytest.mark.parametrize(
    "serve",
    [
        {"api_keys": ["my secret"]},
        {"admin_key": "my secret"},
        {"keys": [{"sha256": "my secret"}]},
    ],
)
def test_a_key_that_is_no_digest_is_refused_and_not_repeated(serve: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"sha256 hex.*m1serve keys new") as caught:
        load_settings(serve=serve)
    assert "my secret" not in str(caught.value)


def test_a_key_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="hold a key twice"):
        load_settings(serve={"api_keys": [KEY], "keys": [{"sha256": KEY.upper()}]})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "temperature", -0.1),
        ("model", "top_p", 1.5),
        ("model", "max_tokens", 0),
        ("serve", "poll_s", 0),
        ("serve", "session_idle_s", -1),
        ("score", "timeout_s", 0),
        ("score", "memory_bytes", 0),
        ("score", "max_attempts", 0),
        ("score", "reap_s", 0),
        ("train", "lr", 0),
        ("train", "lr", float("nan")),
        ("train", "weight_max", float("inf")),
        ("train", "grad_clip", 0),
        ("train", "every_s", 0),
        ("train", "parity_mean_max", -1),
        ("gate", "max_drop", -0.1),
        ("gate", "family_z", 0),
        ("gate", "min_format_rate", 2),
    ],
)
def test_a_number_that_cannot_work_is_refused_at_the_start(
    section: str, key: str, value: float
) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{key}"):
        load_settings(**{section: {key: value}})


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
