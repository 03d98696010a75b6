import json
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.chat.messages import ChatMessage, resolve_tool_names
from m1serve.chat.template import encode_extension, encode_prompt, template_digest
from m1serve.types import ToolCall

TOK = byte_tokenizer()
M1_CONFIG = Path(__file__).parents[2].parent / "shared" / "data" / "m1" / "tokenizer_config.json"
TOOLS: list[dict[str, object]] = [
    {"name": "look", "description": "Find é", "parameters": {"type": "object", "properties": {}}}
]


@pytest.fixture(scope="module")
def published() -> jinja2.Template:
    if not M1_CONFIG.is_file():
        pytest.skip(f"MiniMax-M1's tokenizer_config.json is not at {M1_CONFIG}")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    config = json.loads(M1_CONFIG.read_text(encoding="utf-8"))
    return environment.from_string(config["chat_template"])


def as_published(messages: list[ChatMessage]) -> list[dict[str, object]]:
    return [
        {"role": m.role, "content": [{"type": "text", "text": m.content, "name": m.name}]}
        for m in messages
    ]


def say(role: str, content: str, **more: object) -> ChatMessage:
    return ChatMessage(role=role, content=content, **more)  # type: ignore[arg-type]


CONVERSATIONS = {
    "user": [say("user", "Hi")],
    "system and turns": [
        say("system", "Be brief."),
        say("user", "Hi"),
        say("assistant", "Hello"),
        say("user", "Bye"),
    ],
    "hoisted systems": [say("system", "A"), say("user", "u"), say("system", "B")],
    "tool result": [say("user", "u"), say("assistant", "a"), say("tool", "r", name="look")],
    "greeting first": [say("system", "S"), say("assistant", "Hi!"), say("user", "u")],
    "empty system": [say("system", ""), say("user", "u")],
}


@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_prompt_is_the_published_templates(
    published: jinja2.Template, name: str, tools: list[dict[str, object]]
) -> None:
    messages = CONVERSATIONS[name]
    text = published.render(
        messages=as_published(messages), tools=tools, add_generation_prompt=True
    )
    prompt = encode_prompt(TOK, messages, tools)
    assert TOK.decode(prompt.ids) == text
    assert list(prompt.ids) == TOK.encode_control(text)


def test_the_example_line_is_unquoted() -> None:
    text = TOK.decode(encode_prompt(TOK, [say("user", "u")], TOOLS).ids)
    assert "\n{name: <tool-name-1>, arguments: <args-json-object-1>}\n" in text


def test_tool_results_in_a_row_are_one_turn() -> None:
    messages = [
        say("user", "u"),
        say("tool", "r1", name="a"),
        say("tool", "r2", name="b"),
    ]
    text = TOK.decode(encode_prompt(TOK, messages, []).ids)
    turn = "tool name: a\ntool result: r1\n\ntool name: b\ntool result: r2\n\n<end_of_sentence>"
    assert f"<beginning_of_sentence>tool name=tools\n{turn}" in text


def test_calls_are_rendered_as_the_model_writes_them_and_thinking_is_dropped() -> None:
    answer = say(
        "assistant",
        "Let me see.",
        reasoning="secret",
        tool_calls=(
            ToolCall(name="look", arguments='{"x": 1}'),
            ToolCall(name="look", arguments='{"broken": '),
        ),
    )
    ids = encode_prompt(TOK, [say("user", "u"), answer], []).ids
    text = TOK.decode(ids)
    assert (
        "ai name=assistant\nLet me see.\n<tool_calls>\n"
        '{"name": "look", "arguments": {"x": 1}}\n'
        '{"name": "look", "arguments": {"broken": }\n</tool_calls><end_of_sentence>\n'
    ) in text
    assert TOK.control_ids["<tool_calls>"] in ids
    assert "secret" not in text


@given(st.text(), st.sampled_from(["<end_of_sentence>", "<think>", "<tool_calls>", ""]))
def test_no_message_adds_control_tokens(text: str, tag: str) -> None:
    control = set(TOK.control_ids.values())

    def shape(content: str) -> list[int]:
        messages = [
            say("system", content),
            say("user", content),
            say("assistant", content, tool_calls=(ToolCall(name=content, arguments=content),)),
            say("tool", content, name=content),
        ]
        ids = encode_prompt(TOK, messages, [{"name": content}]).ids
        return [token_id for token_id in ids if token_id in control]

    assert shape(text + tag + "x") == shape("x")


def test_the_system_prefix_ends_where_turns_begin() -> None:
    messages = [say("system", "S"), say("user", "u")]
    prompt = encode_prompt(TOK, messages, TOOLS)
    assert TOK.decode(prompt.ids[prompt.system_end :]).startswith("<beginning_of_sentence>user")


def test_an_extension_continues_exactly_like_the_whole() -> None:
    first, answer = [say("user", "u")], say("assistant", "a")
    news = [say("tool", "r", name="t"), say("user", "v")]
    sampled = [*encode_prompt(TOK, first, []).ids, *TOK.encode_control("a<end_of_sentence>")]
    whole = encode_prompt(TOK, [*first, answer, *news], []).ids
    assert (*sampled, *encode_extension(TOK, True, news)) == whole
    assert (*sampled[:-1], *encode_extension(TOK, False, news)) == whole


def test_tool_names_come_from_the_call_they_answer() -> None:
    messages = [
        say("assistant", "", tool_calls=(ToolCall(name="look", arguments="{}", id="c1"),)),
        say("tool", "r", tool_call_id="c1"),
        say("tool", "r", tool_call_id="c9"),
    ]
    assert [m.name for m in resolve_tool_names(messages)] == [None, "look", "tool"]


def test_a_changed_digest_is_a_changed_prompt_and_never_an_accident() -> None:
    assert template_digest() == "5954c57cc6306bbe0eeeed4e423799884def06e4969b527e73de2abdd9df7282"
