"""docs/api.md says what the code does: every field, setting, route and header is on it."""

import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from m1serve.api import create_app
from m1serve.api.defaults import answer_defaults
from m1serve.api.schema import ChatRequest, CompletionRequest
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import AnswerSettings, Settings, load_settings

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, AnswerSettings])
def test_every_field_is_on_the_page(kind: Any) -> None:
    assert [name for name in kind.model_fields if f"`{name}`" not in PAGE] == []


async def test_every_route_is_on_the_page(serve: Any, tok: ChatTokenizer) -> None:
    async with serve() as world:
        app = create_app(world.engine, world.journal, Settings(), tok)
    paths = [r.path.replace(":path}", "}") for r in app.routes if isinstance(r, APIRoute)]
    shown = PAGE.replace("/v1/models/{id}", "/v1/models/{name}")
    shown = shown.replace("/v1/sessions/{id}", "/v1/sessions/{session_id}")
    assert [path for path in paths if path not in shown] == []


async def test_every_header_of_ours_is_on_the_page(serve: Any) -> None:
    async with serve() as world:
        answer = await world.client.chat.completions.with_raw_response.create(
            model="fake", messages=[{"role": "user", "content": "Hi"}]
        )
    names = [name for name in answer.headers if name.startswith("x-") and "accel" not in name]
    assert len(names) >= 4
    assert [name for name in names if f"`{name}`" not in PAGE] == []


def test_the_settings_shown_are_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [toml] = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    file = tmp_path / "m1serve.toml"
    file.write_text(toml)
    monkeypatch.setenv("M1SERVE_CONFIG", str(file))
    named = answer_defaults(load_settings(file).model)
    assert named["gpt-4o-2024-05-13"].bounds_answer_only
    assert named["gpt-4.1-2025-04-14"].reasoning_fields == ("reasoning_content", "reasoning")
