"""A checkpoint's own template against the one that is built in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from m1serve.chat.published import template_difference


@pytest.fixture(scope="module")
def published(m1_data: Path) -> str:
    source = json.loads((m1_data / "tokenizer_config.json").read_text())["chat_template"]
    assert isinstance(source, str)
    return source


def test_m1s_own_template_is_the_one_that_is_built_in(published: str) -> None:
    assert template_difference(published) is None


def test_one_that_takes_plain_strings_is_the_same(published: str) -> None:
    as_strings = published.replace("message['content'][0]['text']", "message['content']")
    as_strings = as_strings.replace(
        "{% for content in message['content'] | selectattr('type', 'equalto', 'text') -%}"
        "{{ content['text'] -}}{%- endfor -%}",
        "{{ message['content'] -}}",
    )
    assert "['content'][0]" not in as_strings
    assert template_difference(as_strings) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("ai name=assistant", "ai name=MiniMax AI"), "it renders "),
        (("<begin_of_document>", ""), "where m1serve renders '<begin_of_document>"),
        (("{% set ns", "{% sot ns"), "it cannot be rendered (TemplateSyntaxError"),
        (("{% set ns", "{{ 1 / 0 }}{% set ns"), "(ZeroDivisionError"),
        (
            ("{% set ns", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}{% set ns"),
            "(RecursionError",
        ),
        (("{% set ns", "{{ ''.__class__.__mro__ }}{% set ns"), "(SecurityError"),
    ],
)
def test_another_template_is_named_with_its_first_difference(
    published: str, change: tuple[str, str], said: str
) -> None:
    difference = template_difference(published.replace(*change))
    assert difference is not None
    assert said in difference
