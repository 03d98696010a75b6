"""Aliases: names with answers of their own."""

import json
from pathlib import Path
from typing import Any

import pytest

from m1serve.api.defaults import answer_defaults
from m1serve.config import ModelSettings, load_settings
from m1serve.errors import ConfigError
from m1serve.types import HistoryRule

HI: Any = [{"role": "user", "content": "Hi"}]
TOML = """
[model]
model_id = "fake"
temperature = 0.5
max_tokens = 50

[model.aliases."gpt-4o-2024-05-13"]
temperature = 1.0
top_p = 0.95
history = "template"
max_tokens_applies_to = "answer"
reasoning_budget = 40
reasoning_field = "both"

[model.aliases."MiniMaxAI/MiniMax-M1-80k"]
"""


@pytest.fixture
def from_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSettings:
    file = tmp_path / "m1serve.toml"
    file.write_text(TOML)
    monkeypatch.setenv("M1SERVE_CONFIG", str(file))
    return load_settings(file).model


def test_an_alias_takes_from_the_model_what_it_does_not_say(from_toml: ModelSettings) -> None:
    named = answer_defaults(from_toml)
    assert list(named) == ["fake", "gpt-4o-2024-05-13", "MiniMaxAI/MiniMax-M1-80k"]
    gpt, plain = named["gpt-4o-2024-05-13"], named["MiniMaxAI/MiniMax-M1-80k"]
    assert plain == named["fake"]
    assert (plain.temperature, plain.top_p, plain.max_tokens) == (0.5, 1.0, 50)
    assert (gpt.temperature, gpt.top_p, gpt.max_tokens) == (1.0, 0.95, 50)
    assert (gpt.history, plain.history) == (HistoryRule.TEMPLATE, HistoryRule.EXACT)
    assert (gpt.bounds_answer_only, gpt.reasoning_budget) == (True, 40)
    assert gpt.reasoning_fields == ("reasoning_content", "reasoning")


def test_a_list_of_names_is_aliases_like_the_model() -> None:
    model = ModelSettings(model_id="m", aliases=["a", "b"], top_p=0.9)  # type: ignore[arg-type]
    named = answer_defaults(model)
    assert named["a"] == named["b"] == named["m"]


def test_a_mistyped_default_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "m1serve.toml"
    monkeypatch.setenv("M1SERVE_CONFIG", str(file))
    file.write_text("[model.aliases.gpt]\ntemprature = 1.0\n")
    with pytest.raises(ConfigError, match=r"model.aliases.gpt.temprature .* mean temperature"):
        load_settings(file)


def test_an_alias_may_not_be_the_model() -> None:
    model = ModelSettings(model_id="m", aliases=["m"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="other than 'm'"):
        answer_defaults(model)


@pytest.mark.parametrize(
    ("model_type", "hidden", "top_p", "history"),
    [
        ("minimax_m1", 6144, 0.95, "template"),
        ("minimax", 6144, 0.95, "template"),
        ("minimax_m1", 192, 1.0, "exact"),
        (["minimax_m1"], 6144, 1.0, "exact"),
    ],
)
def test_a_real_m1_answers_as_published(
    tmp_path: Path, model_type: object, hidden: int, top_p: float, history: str
) -> None:
    config = {"model_type": model_type, "hidden_size": hidden, "num_hidden_layers": 80}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = answer_defaults(ModelSettings(path=tmp_path))["nano"]
    assert (found.temperature, found.top_p, found.history) == (1.0, top_p, history)
    own = answer_defaults(ModelSettings(path=tmp_path, top_p=0.5))["nano"]
    assert own.top_p == 0.5


async def test_every_name_samples_with_its_own_defaults(
    serve: Any, from_toml: ModelSettings
) -> None:
    async with serve(model=from_toml.model_dump()) as world:
        for name in ("fake", "gpt-4o-2024-05-13", "MiniMaxAI/MiniMax-M1-80k"):
            answer = await world.client.chat.completions.create(model=name, messages=HI)
            assert answer.model == name
        await world.client.chat.completions.create(
            model="gpt-4o-2024-05-13", messages=HI, temperature=0.25, top_p=0.5, max_tokens=7
        )
    plain, gpt, other, said = world.engine.requests
    assert (plain.sampling, plain.limits) == (other.sampling, other.limits)
    assert (plain.sampling.temperature, plain.limits.max_tokens) == (0.5, 50)
    assert plain.limits.answer_tokens is None
    assert (gpt.sampling.temperature, gpt.sampling.top_p) == (1.0, 0.95)
    assert (gpt.limits.answer_tokens, gpt.limits.reasoning_budget) == (50, 40)
    assert gpt.limits.max_tokens == 4096
    assert (said.sampling.temperature, said.sampling.top_p) == (0.25, 0.5)
    assert said.limits.answer_tokens == 7


async def test_history_is_each_names_own(serve: Any, from_toml: ModelSettings) -> None:
    async with serve("<think>\nhm\n</think>\nHo.", model=from_toml.model_dump()) as world:
        for name in ("fake", "gpt-4o-2024-05-13"):
            for turn in (1, 2):
                said: Any = [*HI, {"role": "assistant", "content": "Ho."}, *HI]
                await world.client.chat.completions.create(
                    model=name, messages=HI if turn == 1 else said
                )
    exact, again, template, rendered = world.engine.requests
    assert again.prompt_ids[: len(exact.prompt_ids)] == exact.prompt_ids
    assert world.tok.control_ids["<think>"] in again.prompt_ids
    assert world.tok.control_ids["<think>"] not in rendered.prompt_ids
    assert [turn.history_rule for turn in world.turns] == ["exact"] * 2 + ["template"] * 2
    assert len(template.prompt_ids) == len(exact.prompt_ids)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_reasoning_may_go_by_both_names(
    serve: Any, from_toml: ModelSettings, is_stream: bool
) -> None:
    async with serve("<think>\nhm\n</think>\nHo.", model=from_toml.model_dump()) as world:
        for name, has_both in (("gpt-4o-2024-05-13", True), ("fake", False)):
            answer = await world.client.chat.completions.create(
                model=name, messages=HI, stream=is_stream
            )
            deltas = (
                [c.choices[0].delta async for c in answer]
                if is_stream
                else [answer.choices[0].message]
            )
            text = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
            other = "".join(getattr(d, "reasoning", None) or "" for d in deltas)
            assert (text, other) == ("hm", "hm" if has_both else "")


async def test_every_name_is_listed_with_its_root(serve: Any, from_toml: ModelSettings) -> None:
    async with serve(model=from_toml.model_dump()) as world:
        listed = [model async for model in world.client.models.list()]
        one = await world.client.models.retrieve("MiniMaxAI/MiniMax-M1-80k")
    assert [m.id for m in listed] == ["fake", "gpt-4o-2024-05-13", "MiniMaxAI/MiniMax-M1-80k"]
    assert [(m.root, m.parent) for m in listed] == [
        ("fake", None),
        ("fake", "fake"),
        ("fake", "fake"),
    ]
    assert one.id == "MiniMaxAI/MiniMax-M1-80k"
    assert one.max_model_len == 4096
    assert listed[1].defaults["max_tokens_applies_to"] == "answer"
