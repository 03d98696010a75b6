import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m1serve.chat.reply import (
    CallArguments,
    CallStarted,
    ContentText,
    ParsedReply,
    ReasoningText,
    ReplyEvent,
    ReplyParser,
    count_reasoning_tokens,
    parse_reply,
    turn_from_ids,
)
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.types import StopCause, ToolCall


def call_line(name: str, arguments: object) -> str:
    return json.dumps({"name": name, "arguments": arguments}) + "\n"


def calls(*lines: str) -> str:
    return "<tool_calls>\n" + "".join(lines) + "</tool_calls>"


def call(name: str, arguments: str) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def fold(events: list[ReplyEvent]) -> tuple[str, str, tuple[ToolCall, ...]]:
    reasoning = content = ""
    found: list[list[str]] = []
    for event in events:
        match event:
            case ReasoningText(text):
                reasoning += text
            case ContentText(text):
                content += text
            case CallStarted(index, name):
                assert index == len(found)
                found.append([name, ""])
            case CallArguments(index, text):
                assert index == len(found) - 1
                found[index][1] += text
    return reasoning, content, tuple(call(name, arguments) for name, arguments in found)


def parse_in_pieces(text: str, size: int) -> ParsedReply:
    parser = ReplyParser()
    events: list[ReplyEvent] = []
    for place in range(0, len(text), size):
        events += parser.push(text[place : place + size])
    events += parser.finish()
    parsed = parser.parsed()
    assert fold(events) == (parsed.reasoning or "", parsed.content, parsed.tool_calls)
    return parsed


CASES = {
    "answer": ("Hello.", None, "Hello.", (), True),
    "think and answer": ("<think>\na\nb\n</think>\nHi.\n", "a\nb", "Hi.\n", (), True),
    "think and call": (
        "<think>\na\n</think>\n" + calls(call_line("f", {"x": 1})),
        "a",
        "",
        (call("f", '{"x": 1}'),),
        True,
    ),
    "call without think": (calls(call_line("f", {})), None, "", (call("f", "{}"),), True),
    "content and call": (
        "Let me see.\n" + calls(call_line("f", {})),
        None,
        "Let me see.",
        (call("f", "{}"),),
        True,
    ),
    "two calls": (
        calls(call_line("f", {"a": [1, {}]}), call_line("g", {"b": "x"})),
        None,
        "",
        (call("f", '{"a": [1, {}]}'), call("g", '{"b": "x"}')),
        True,
    ),
    "calls inside think are thought": (
        "<think>\n<tool_calls>\n{}\n</tool_calls>\n</think>\nok",
        "<tool_calls>\n{}\n</tool_calls>",
        "ok",
        (),
        True,
    ),
    "tags inside a string": (
        calls(call_line("f", {"x": "</tool_calls><tool_calls></think>"})),
        None,
        "",
        (call("f", '{"x": "</tool_calls><tool_calls></think>"}'),),
        True,
    ),
    "braces and quotes inside a string": (
        calls(call_line("f", {"x": '"}A', "y": "\\"})),
        None,
        "",
        (call("f", json.dumps({"x": '"}A', "y": "\\"})),),
        True,
    ),
    "arguments before the name": (
        calls('{"arguments": {"x":1}, "name": "f"}\n'),
        None,
        "",
        (call("f", '{"x":1}'),),
        True,
    ),
    "spread over lines": (
        calls('{\n  "name": "f",\n  "arguments": {\n    "x": 1\n  }\n}\n'),
        None,
        "",
        (call("f", '{\n    "x": 1\n  }'),),
        True,
    ),
    "an extra member": (
        calls('{"name": "f", "arguments": {}, "id": 3}\n'),
        None,
        "",
        (call("f", "{}"),),
        False,
    ),
    "cut inside the arguments": (
        '<tool_calls>\n{"name": "f", "arguments": {"x": "ab',
        None,
        "",
        (call("f", '{"x": "ab'),),
        False,
    ),
    "a block that is never closed": (
        '<tool_calls>\n{"name": "f", "arguments": {}}\n',
        None,
        "",
        (call("f", "{}"),),
        False,
    ),
    "an object that ends in the closing tag": (
        '<tool_calls>\n{"name": "f", "arguments": {"x": 1</tool_calls>',
        None,
        "",
        (call("f", '{"x": 1'),),
        False,
    ),
    "an unquoted call is content": (
        calls("{name: f, arguments: {}}\n"),
        None,
        "{name: f, arguments: {}}",
        (),
        False,
    ),
    "no object": (calls("f(x)\n"), None, "f(x)\n", (), False),
    "arguments that are no object": (
        calls('{"name": "f", "arguments": [1]}\n'),
        None,
        '{"name": "f", "arguments": [1]}',
        (),
        False,
    ),
    "broken JSON inside the arguments": (
        calls('{"name": "f", "arguments": {"x": }}\n'),
        None,
        "",
        (call("f", '{"x": }'),),
        False,
    ),
    "cut behind the arguments": (
        '<tool_calls>\n{"name": "f", "arguments": {"x": 1}',
        None,
        "",
        (call("f", '{"x": 1}'),),
        False,
    ),
    "cut before the name is known": (
        '<tool_calls>\n{"name": "loo',
        None,
        '{"name": "loo',
        (),
        False,
    ),
    "a second call cut before its name is known": (
        '<tool_calls>\n{"name": "f", "arguments": {}}\n{"name": "g", "ar',
        None,
        '{"name": "g", "ar',
        (call("f", "{}"),),
        False,
    ),
    "cut inside the closing tag": (
        '<tool_calls>\n{"name": "f", "arguments": {}}\n</tool_ca',
        None,
        "",
        (call("f", "{}"),),
        False,
    ),
    "a number that JSON does not have": (
        calls('{"name": "f", "arguments": {"x": NaN}}\n'),
        None,
        "",
        (call("f", '{"x": NaN}'),),
        False,
    ),
    "a line break inside a string": (
        calls('{"name": "f", "arguments": {"x": "a\nb"}}\n'),
        None,
        "",
        (call("f", '{"x": "a\nb"}'),),
        False,
    ),
    "brackets that do not match": (
        calls('{"name": "f", "arguments": {"x": 1]}\n'),
        None,
        "",
        (call("f", '{"x": 1]'),),
        False,
    ),
    "a name that is no text": (
        calls('{"name": "\\ud800", "arguments": {}}\n'),
        None,
        '{"name": "\\ud800", "arguments": {}}',
        (),
        False,
    ),
    "an escaped name": (
        calls('{"name": "\\u0066\\ud83d\\ude00", "arguments": {}}\n'),
        None,
        "",
        (call("f😀", "{}"),),
        True,
    ),
    "calls on one line": (
        '<tool_calls>{"name": "f", "arguments": {}}{"name":"g","arguments":{"a":1}}</tool_calls>',
        None,
        "",
        (call("f", "{}"), call("g", '{"a":1}')),
        True,
    ),
    "two blocks": (
        calls(call_line("f", {})) + "\n" + calls(call_line("g", {})),
        None,
        "",
        (call("f", "{}"), call("g", "{}")),
        False,
    ),
    "think inside think": (
        "<think>\na<think>b</think>c",
        "a<think>b",
        "c",
        (),
        True,
    ),
    "whitespace first": (" \n Hi", None, " \n Hi", (), True),
    "whitespace before the think block": (" \n<think>\na\n</think>\n  x", "a", "  x", (), True),
    "line breaks are kept inside": ("<think>\n\na\n\n</think>\n\nx", "\na\n", "x", (), True),
    "nothing but whitespace": (" \n ", None, " \n ", (), False),
    "think without an end": ("<think>\nabc", "abc", "", (), False),
    "empty think": ("<think>\n</think>\nx", "", "x", (), True),
    "nothing but thinking": ("<think>\na\n</think>\n", "a", "", (), False),
    "a second think block": (
        "<think>\na\n</think>\nb<think>c</think>",
        "a",
        "b<think>c</think>",
        (),
        False,
    ),
    "text after the calls": (
        calls(call_line("f", {})) + "\nbye",
        None,
        "bye",
        (call("f", "{}"),),
        False,
    ),
    "a tag cut short": ("ab <tool_cal", None, "ab <tool_cal", (), True),
    "half an end of think": ("<think>\nab</thi", "ab</thi", "", (), False),
    "nothing": ("", None, "", (), False),
}


BROKEN = {
    "cut before the name is known",
    "a second call cut before its name is known",
    "cut inside the arguments",
    "cut behind the arguments",
    "an object that ends in the closing tag",
    "broken JSON inside the arguments",
    "a number that JSON does not have",
    "a line break inside a string",
    "brackets that do not match",
}


@pytest.mark.parametrize("name", CASES)
def test_a_reply_is_split(name: str) -> None:
    text, reasoning, content, tool_calls, is_well_formed = CASES[name]
    assert parse_reply(text) == ParsedReply(
        reasoning=reasoning,
        content=content,
        tool_calls=tool_calls,
        has_broken_call=name in BROKEN,
        is_well_formed=is_well_formed,
    )


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("name", CASES)
def test_a_reply_in_pieces_is_the_same_reply(name: str, size: int) -> None:
    text = CASES[name][0]
    assert parse_in_pieces(text, size) == parse_reply(text)


FRAGMENTS = [
    *("<think>", "</think>", "<tool_calls>", "</tool_calls>", "\n", " ", "<", '"', "\\", "{", "}"),
    *(
        '{"name": "f", "arguments": {"x": "',
        '"}}',
        "[",
        "]",
        "a",
        "é",
        '{"arguments": {}, "name": "',
    ),
]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14), st.data())
def test_no_chunking_changes_any_reply(fragments: list[str], data: st.DataObject) -> None:
    text = "".join(fragments)
    whole = parse_reply(text)
    for size in (1, data.draw(st.integers(2, 9))):
        assert parse_in_pieces(text, size) == whole


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    reasoning=st.text().filter(lambda text: "</think>" not in text),
    written=st.lists(
        st.tuples(st.text(), st.dictionaries(st.text(), json_values, max_size=3)), max_size=3
    ),
    is_ascii=st.booleans(),
    size=st.integers(1, 20),
)
def test_what_was_written_well_comes_back(
    reasoning: str,
    written: list[tuple[str, dict[str, object]]],
    is_ascii: bool,
    size: int,
) -> None:
    lines = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=is_ascii) + "\n"
        for name, arguments in written
    ]
    text = f"<think>\n{reasoning}\n</think>\n" + (calls(*lines) if written else "done")
    reply = parse_in_pieces(text, size)
    assert reply.reasoning == reasoning
    assert [(c.name, json.loads(c.arguments)) for c in reply.tool_calls] == written
    assert reply.is_well_formed


def test_arguments_are_streamed_as_they_come() -> None:
    parser = ReplyParser()
    parser.push('<tool_calls>\n{"name": "f", "arguments": {"x": "')
    assert parser.push("abc") == [CallArguments(0, "abc")]


def test_without_tools_markup_is_content() -> None:
    text = calls(call_line("f", {}))
    assert parse_reply(text, parse_calls=False).content == text


def test_a_turn_is_read_from_its_ids(tok: ChatTokenizer) -> None:
    ids = tok.encode_control("<think>\nhm\n</think>\nHi<end_of_sentence>")
    turn = turn_from_ids(tok, turn_id="t", completion_ids=ids, stop=StopCause.EOS)
    assert (turn.text, turn.reasoning, turn.content) == ("<think>\nhm\n</think>\nHi", "hm", "Hi")
    assert turn.is_well_formed
    assert turn.num_tokens == len(ids)


@pytest.mark.parametrize(
    ("text", "num"),
    [("<think>ab</think>c", 4), ("<think>ab", 3), ("ab", 0), ("\n<think>a</think>", 4)],
)
def test_reasoning_tokens_are_counted_exactly(tok: ChatTokenizer, text: str, num: int) -> None:
    assert count_reasoning_tokens(tok, tok.encode_control(text)) == num


ENDLESS = {
    "reasoning": ("<think>\n", "word "),
    "content": ("", "word "),
    "a name": ('<tool_calls>\n{"name": "', "word "),
    "arguments": ('<tool_calls>\n{"name": "f", "arguments": {"x": "', "word "),
    "arguments before a name": ('<tool_calls>\n{"arguments": {"x": "', "word "),
    "members behind arguments": ('<tool_calls>\n{"name": "f", "arguments": {}, "x": "', "word "),
    "whitespace": ("x", "\n"),
    "whitespace first": ("", " "),
    "junk in a block": ("<tool_calls>\n", "f(x) "),
    "beginnings of tags": ("", "<tool_calls"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_was_read_is_not_read_again(name: str) -> None:
    """Costs are linear: no more than a tag's length is looked at twice."""
    head, filler = ENDLESS[name]
    parser = ReplyParser()
    parser.push(head)
    for _ in range(50):
        parser.push(filler)
        assert len(parser._text) - parser._at <= len("</tool_calls>")
    parser.finish()
