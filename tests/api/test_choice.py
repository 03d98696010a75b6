"""One choice's pipeline: however the engine cuts its deltas, the message is the same."""

from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from m1serve.api.choice import ChoiceStream
from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.chat.messages import ChatMessage
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

NANO = Path(__file__).parents[2] / "m1serve" / "model" / "nano" / "tokenizer.json"
TOKENIZERS = [byte_tokenizer(), ChatTokenizer.load(NANO)]
PIECES = [
    *("<think>", "</think>", "<think>\n", "\n</think>\n", "<tool_calls>\n", "\n</tool_calls>"),
    *('{"name": "look", "arguments": {"x": "a<b"}}', '{"arguments": {}, "name": "say"}', "\n"),
    *(
        '{"name": "cut',
        "{'no': json}",
        "STOP",
        "ST",
        "STO",
        "OP now",
        " ",
        "words, ",
        "é🙂",
        "</th",
    ),
]
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=9).map("".join)


def ids_of(tok: ChatTokenizer, text: str, cut: int) -> list[int]:
    """`cut` may leave half a character at the end."""
    ids = tok.encode_control(text)
    return ids[: max(0, len(ids) - cut)]


def delta(ids: Sequence[int], stop: StopCause | None) -> Delta:
    return Delta(
        choice=0,
        token_ids=tuple(ids),
        logprobs=(-0.5,) * len(ids),
        token_flags=(1,) * len(ids),
        weights_version="fake@0",
        stop=stop,
    )


def play(
    tok: ChatTokenizer, ids: list[int], sizes: list[int], stops: list[str], cause: StopCause
) -> tuple[ChoiceStream, list[ReplyEvent]]:
    """Sizes of the deltas, over and over; the last one may be empty but for its cause."""
    choice = ChoiceStream(0, tok, stop_strings=stops, parser=ReplyParser(parse_calls=True))
    events: list[ReplyEvent] = []
    place, turn = 0, 0
    while place < len(ids):
        size = sizes[turn % len(sizes)]
        events += choice.push(delta(ids[place : place + size], None))
        place, turn = place + size, turn + 1
    return choice, events + choice.push(delta((), cause))


def folded(events: Sequence[ReplyEvent]) -> tuple[str, str, list[tuple[str, str]]]:
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case ReasoningText(text):
                reasoning += text
            case ContentText(text):
                content += text
            case CallStarted(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    return reasoning, content, calls


def told(message: ChatMessage) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    return message.reasoning or "", message.content, calls


@settings(max_examples=300, deadline=None)
@given(
    place=st.integers(0, len(TOKENIZERS) - 1),
    text=TEXTS,
    cut=st.integers(0, 3),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    stops=st.lists(st.sampled_from(["STOP", "TOP", "é", "\n\n", "</think>\nw"]), max_size=2),
    cause=st.sampled_from([StopCause.EOS, StopCause.LENGTH, StopCause.STOP_STRING]),
)
def test_any_cutting_of_the_same_tokens_gives_the_same_message(
    place: int, text: str, cut: int, sizes: list[int], stops: list[str], cause: StopCause
) -> None:
    tok = TOKENIZERS[place]
    ids = ids_of(tok, text, cut)
    whole, whole_events = play(tok, ids, [len(ids) or 1], stops, cause)
    parts, events = play(tok, ids, sizes, stops, cause)
    # a stream says what the body says, and neither depends on where the deltas were cut
    assert folded(events) == folded(whole_events) == told(whole.message) == told(parts.message)
    assert parts.finish_reason == whole.finish_reason
    assert parts.num_reasoning_tokens == whole.num_reasoning_tokens
    assert parts.token_ids == whole.token_ids == ids
    assert parts.spans == whole.spans
    assert len(set(parts.call_ids)) == len(parts.message.tool_calls)
    # without markup nothing can be put together again from both sides of a tag
    assert "<" in text or not any(stop in folded(events)[1] for stop in stops)


def test_every_choice_names_its_calls_anew() -> None:
    tok = TOKENIZERS[0]
    text = '<tool_calls>\n{"name": "a", "arguments": {}}\n{"name": "a", "arguments": {}}\n'
    ids = ids_of(tok, text + "</tool_calls>", 0)
    names = [
        call_id for _ in range(3) for call_id in play(tok, ids, [2], [], StopCause.EOS)[0].call_ids
    ]
    assert len(names) == len(set(names)) == 6
