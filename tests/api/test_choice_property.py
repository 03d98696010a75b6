"""One choice, any chunking: the same token ids give the same events, message and counts."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import m1serve.model
from m1serve.api.choice import ChoiceStream
from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.chat.reply import (
    CallArguments,
    CallStarted,
    ContentText,
    ReasoningText,
    ReplyEvent,
    ReplyParser,
)
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.types import Delta, StopCause

NANO = ChatTokenizer.load(Path(m1serve.model.__file__).parent / "nano")
TOKENIZERS = {"bytes": byte_tokenizer(), "nano": NANO}
FRAGMENTS = [
    *("<think>", "</think>", "<tool_calls>", "</tool_calls>", "<", "</th", "\n", " ", "\\", '"'),
    *('{"name": "f", "arguments": {"x": "', '"}}', "{", "}", "[", "]", ",", ":", "a", "é", "🙂"),
    *('{"arguments": {"a": 1}, "name": "g"}', '{"name": "f", "arguments": {}}', "\\ud83d", "\\n"),
]
WHOLE = (
    "<think>\nIs `</tool_calls>` 🙂?\n</think>\nLet me see.\n<tool_calls>\n"
    '{"name": "look", "arguments": {"q": "<think>\\"}]\\\\ \\ud83d\\ude42 é</tool_calls>"}}\n'
    '{"name": "näch", "arguments": {"a": [1, {"b": null}], "c": "日本語"}}\n</tool_calls>'
)


def delta(ids: Sequence[int], stop: StopCause | None = None) -> Delta:
    return Delta(
        choice=0,
        token_ids=tuple(ids),
        logprobs=(-0.5,) * len(ids),
        token_flags=(1,) * len(ids),
        weights_version="m@0",
        stop=stop,
    )


def fold(events: list[ReplyEvent]) -> list[object]:
    """What a client has put together of the stream: reasoning, content, then the calls."""
    reasoning = content = ""
    calls: list[list[str]] = []
    for event in events:
        match event:
            case ReasoningText(text):
                assert not content
                assert not calls
                reasoning += text
            case ContentText(text):
                content += text
            case CallStarted(index, name):
                assert index == len(calls)
                calls.append([name, ""])
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[index][1] += text
    return [reasoning, content, calls]


def outcome(
    tok: ChatTokenizer,
    ids: Sequence[int],
    cuts: Sequence[int],
    *,
    stop: StopCause = StopCause.EOS,
    strings: Sequence[str] = (),
) -> list[object]:
    """The choice after `ids` in deltas that end at `cuts`; its stream adds up to its message."""
    choice = ChoiceStream(0, tok, stop_strings=strings, parser=ReplyParser())
    edges = sorted({0, *cuts, len(ids)})
    events: list[ReplyEvent] = []
    for start, end in pairwise(edges):
        events += choice.push(delta(ids[start:end]))
    events += choice.push(delta((), stop))
    message = choice.message
    whole = [message.reasoning or "", message.content]
    whole.append([[call.name, call.arguments] for call in message.tool_calls])
    assert fold(events) == whole
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
    return [*whole, message.reasoning is None, choice.finish_reason, choice.num_reasoning_tokens]


@settings(deadline=None)
@given(
    name=st.sampled_from(list(TOKENIZERS)),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=16),
    strings=st.lists(st.sampled_from(["a", "}", "🙂", "</think>", '"x', "zz"]), max_size=2),
    is_cut=st.booleans(),
    data=st.data(),
)
def test_any_chunking_of_the_tokens_is_the_same_choice(
    name: str, fragments: list[str], strings: list[str], is_cut: bool, data: st.DataObject
) -> None:
    tok = TOKENIZERS[name]
    ids = tok.encode_control("".join(fragments))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=8))
    stop = StopCause.LENGTH if is_cut else StopCause.EOS
    whole = outcome(tok, ids, (), stop=stop, strings=strings)
    assert outcome(tok, ids, cuts, stop=stop, strings=strings) == whole
    assert outcome(tok, ids, range(len(ids)), stop=stop, strings=strings) == whole


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_reply_cut_after_any_token_is_said_alike_and_no_part_of_a_call_is_a_call(
    name: str,
) -> None:
    """vllm-project/vllm#58228, #46303: what a client sees when max_tokens cuts a call."""
    tok = TOKENIZERS[name]
    ids = tok.encode_control(WHOLE)
    for size in range(len(ids) + 1):
        cut = outcome(tok, ids[:size], range(size), stop=StopCause.LENGTH)
        assert cut == outcome(tok, ids[:size], (), stop=StopCause.LENGTH)
        assert cut[4] == "length"
        ended = outcome(tok, ids[:size], (), stop=StopCause.EOS)
        assert ended[:3] == cut[:3]
        calls = ended[2]
        assert isinstance(calls, list)
        if ended[4] == "tool_calls":
            assert calls
            for _, arguments in calls:
                json.loads(arguments)
        else:
            assert ended[4] == "stop"
        assert "think" not in str(ended[1])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_reasoning_tokens_end_with_the_token_that_completes_the_tag(name: str) -> None:
    tok = TOKENIZERS[name]
    thought = tok.encode_control("<think>\nhm 🙂\n</think>")
    answer = tok.encode_control("\nHi</think>")
    assert outcome(tok, [*thought, *answer], ())[5] == len(thought)
    # the same tags spelled as text: the parser splits there too
    spelled = tok.encode_text("<think>\nhm\n</think>")
    assert outcome(tok, [*spelled, *answer], ())[5] == len(spelled)
    assert outcome(tok, [*thought[:-1], tok.eos_id], ())[5] == len(thought) - 1
    assert outcome(tok, tok.encode_control("no <think>thought</think>"), ())[5] == 0


STOPPED = {
    "in reasoning": ("<think>\nthe brown fox", "own fo", ["the br", "", []], "stop"),
    "in content": ("<think>\na\n</think>\nthe brown fox", "own fo", ["a", "the br", []], "stop"),
    "over the end of thinking": ("<think>\na\n</think>\nb", "a\n</think>\nb", ["", "", []], "stop"),
    "in JSON content": ('{"a": "x\\"END", "b": 1}', 'END", "', ["", '{"a": "x\\"', []], "stop"),
    "in a call": (
        '<tool_calls>\n{"name": "f", "arguments": {"x": "aENDb"}}\n</tool_calls>',
        "END",
        ["", "", [["f", '{"x": "a']]],
        "stop",
    ),
    "behind a call": (
        '<tool_calls>\n{"name": "f", "arguments": {"x": 1}}\n</tool_calls>',
        "</tool_calls>",
        ["", "", [["f", '{"x": 1}']]],
        "tool_calls",
    ),
}


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("name", STOPPED)
def test_a_stop_string_over_several_tokens_is_never_shown(name: str, tokenizer: str) -> None:
    """vllm-project/vllm#3574, SharpAI/SwiftLM#126: and a call it cuts is not reported as whole."""
    text, string, message, finish = STOPPED[name]
    tok = TOKENIZERS[tokenizer]
    ids = tok.encode_control(text)
    for size in (1, 2, 3, 7, 1000):
        told = outcome(
            tok, ids, range(0, len(ids), size), stop=StopCause.STOP_STRING, strings=[string]
        )
        assert told[:3] == message
        assert told[4] == finish
