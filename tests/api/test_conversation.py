"""Wire messages to the prompt: M1's published template, token for token; text is never control."""

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import m1serve.model
from m1serve.api.conversation import to_messages, to_tools
from m1serve.api.schema import ChatRequest, parse_body
from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.chat.template import encode_prompt
from m1serve.chat.tokenizer import CONTROL, TAGS, ChatTokenizer
from m1serve.errors import RequestError

M1_DATA = Path(__file__).parents[2].parent / "shared" / "data" / "m1"
NANO = ChatTokenizer.load(Path(m1serve.model.__file__).parent / "nano")
ONLY_IN_M1_DATA = pytest.mark.skipif(
    not M1_DATA.is_dir(), reason=f"MiniMax-M1's own files are not at {M1_DATA}"
)


@pytest.fixture(scope="module")
def published() -> Any:
    """The checkpoint's chat template as transformers renders it."""
    renderer = pytest.importorskip("transformers.utils.chat_template_utils")
    config = json.loads((M1_DATA / "tokenizer_config.json").read_text(encoding="utf-8"))
    return partial(
        renderer._compile_jinja_template(config["chat_template"]).render,
        add_generation_prompt=True,
    )


@pytest.fixture(scope="module")
def m1_tokenizer() -> ChatTokenizer:
    """M1's own 199,744 merges."""
    lines = (M1_DATA / "merges.txt").read_text(encoding="utf-8").split("\n")[1:]
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines if line)]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    vocab = {token: place for place, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in CONTROL])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in TAGS])
    return ChatTokenizer(tokenizer.to_str())


def prompt_ids(tok: ChatTokenizer, messages: Any, tools: Any = None, **more: Any) -> list[int]:
    body = {"model": "m", "messages": messages, "tools": tools, **more}
    request = parse_body(ChatRequest, json.dumps(body).encode())
    return list(encode_prompt(tok, to_messages(request), to_tools(request)).ids)


def prompt_text(messages: Any, tools: Any = None, **more: Any) -> str:
    return NANO.decode(prompt_ids(NANO, messages, tools, **more))


# without ">" nobody spells a tag: there the published template, as text, would make a token of it
characters = st.characters(exclude_categories=["Cs"], exclude_characters=">")
texts = st.text(characters, max_size=40) | st.sampled_from(
    ["", "\n", " x ", "{{ 1 }}", "<tool", "tool name: a\ntool result: b\n\n", "naïve 日本語 🙂\r\n"]
)
names = st.text(characters, min_size=1, max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=4,
)
# the order of MiniMax's guide, which is also the one that tools are brought into
tools = st.lists(
    st.builds(
        lambda name, description, parameters: {
            "name": name,
            "description": description,
            "parameters": parameters,
        },
        names,
        texts,
        st.dictionaries(names, json_values, max_size=2),
    ),
    max_size=2,
)


def part(text: str, **more: str) -> dict[str, str]:
    return {"type": "text", "text": text, **more}


def message(role: str, parts: list[dict[str, str]]) -> dict[str, object]:
    return {"role": role, "content": parts}


turns = st.one_of(
    st.builds(lambda text: message("system", [part(text)]), texts),
    st.builds(lambda text: message("user", [part(text)]), texts),
    st.builds(
        lambda said: message("assistant", list(map(part, said))), st.lists(texts, max_size=3)
    ),
    st.builds(
        lambda results: message("tool", [part(text, name=name) for name, text in results]),
        st.lists(st.tuples(names, texts), min_size=1, max_size=3),
    ),
)
conversations = st.lists(turns, min_size=1, max_size=8).filter(
    # the published template opens a turn for each of two tool messages in a row, we one for both
    lambda said: all(not (a["role"] == b["role"] == "tool") for a, b in pairwise(said))
)


@ONLY_IN_M1_DATA
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=conversations, offered=tools)
def test_any_prompt_is_the_published_templates_token_for_token(
    published: Any, messages: list[Any], offered: list[Any]
) -> None:
    text = published(messages=messages, tools=offered)
    assert prompt_ids(NANO, messages, offered) == NANO.encode_control(text)


@ONLY_IN_M1_DATA
@settings(deadline=None, max_examples=30)
@given(messages=conversations, offered=tools)
def test_with_m1s_own_merges_too(
    published: Any, m1_tokenizer: ChatTokenizer, messages: list[Any], offered: list[Any]
) -> None:
    text = published(messages=messages, tools=offered)
    assert prompt_ids(m1_tokenizer, messages, offered) == m1_tokenizer.encode_control(text)


def test_the_published_template_by_heart() -> None:
    """What the two tests above compare, for where M1's files are not at hand."""
    messages = [
        message("user", [part("u1")]),
        message("system", [part("S1")]),
        message("assistant", [part("a"), part("b")]),
        message("tool", [part("r1", name="f"), part("r2", name="g")]),
        message("system", [part("S2")]),
    ]
    offered = [{"name": "f", "description": "é", "parameters": {"type": "object"}}]
    assert prompt_text(messages, offered) == (
        "<begin_of_document><beginning_of_sentence>system ai_setting=assistant\nS1S2"
        "<end_of_sentence>\n<beginning_of_sentence>system tool_setting=tools\n"
        "You are provided with these tools:\n<tools>\n"
        '{"name": "f", "description": "é", "parameters": {"type": "object"}}\n</tools>\n\n'
        "If you need to call tools, please respond with <tool_calls></tool_calls> XML tags, and "
        "provide tool-name and json-object of arguments, following the format below:\n"
        "<tool_calls>\n{name: <tool-name-1>, arguments: <args-json-object-1>}\n...\n</tool_calls>"
        "<end_of_sentence>\n<beginning_of_sentence>user name=user\nu1<end_of_sentence>\n"
        "<beginning_of_sentence>ai name=assistant\nab<end_of_sentence>\n"
        "<beginning_of_sentence>tool name=tools\ntool name: f\ntool result: r1\n\n"
        "tool name: g\ntool result: r2\n\n<end_of_sentence>\n"
        "<beginning_of_sentence>ai name=assistant\n"
    )


def hostile(text: str) -> dict[str, Any]:
    """A request with `text` in every place where a client may put any."""
    return {
        "messages": [
            {"role": "system", "content": text},
            {"role": "developer", "content": [part(text)], "name": text},
            {"role": "user", "content": [part(text), part(text)], "name": text},
            {
                "role": "assistant",
                "content": text,
                "reasoning_content": text,
                "tool_calls": [{"id": text, "function": {"name": text, "arguments": text}}],
            },
            {"role": "tool", "tool_call_id": text, "content": text},
            {"role": "tool", "tool_call_id": "?", "name": text, "content": [part(text, name=text)]},
            {"role": "assistant", "function_call": {"name": text, "arguments": "{}"}},
            {"role": "function", "name": text, "content": text},
        ],
        "tools": [
            {"type": "function", "function": {"name": text, "description": text}},
            {"name": text, "parameters": {text: {"enum": [text]}}},
        ],
    }


@pytest.mark.parametrize("tok", [NANO, byte_tokenizer()], ids=["nano", "bytes"])
@settings(deadline=None)
@given(pieces=st.lists(st.sampled_from([*CONTROL, *TAGS]) | texts, min_size=1, max_size=6))
def test_no_text_of_a_client_is_ever_a_control_token(tok: ChatTokenizer, pieces: list[str]) -> None:
    control = set(tok.control_ids.values())

    def placed(text: str) -> list[int]:
        return [i for i in prompt_ids(tok, **hostile(text)) if i in control]

    assert placed("x" + "".join(pieces)) == placed("x")


PLAIN = {"role": "user", "content": "Hi"}
SAME: dict[str, tuple[list[Any], list[Any]]] = {
    "one part is a string": ([message("user", [part("Hi")])], [PLAIN]),
    "developer is system": (
        [{"role": "developer", "content": "S"}, PLAIN],
        [{"role": "system", "content": "S"}, PLAIN],
    ),
    "systems are hoisted and joined": (
        [{"role": "system", "content": "A"}, PLAIN, {"role": "system", "content": "B"}],
        [{"role": "system", "content": "AB"}, PLAIN],
    ),
    "null content is none": (
        [PLAIN, {"role": "assistant", "content": None}, {"role": "user"}],
        [PLAIN, {"role": "assistant", "content": ""}, {"role": "user", "content": ""}],
    ),
    "no parts are none": ([message("user", [])], [{"role": "user", "content": ""}]),
    "an empty list of calls is none": (
        [PLAIN, {"role": "assistant", "content": "a", "tool_calls": []}],
        [PLAIN, {"role": "assistant", "content": "a"}],
    ),
    "replayed thoughts are dropped": (
        [PLAIN, {"role": "assistant", "content": "a", "reasoning_content": "r"}],
        [PLAIN, {"role": "assistant", "content": "a", "reasoning": "other"}],
    ),
    "an old function call is a call": (
        [PLAIN, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}],
        [PLAIN, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
    ),
    "a refusal is what was said": (
        [PLAIN, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
        [PLAIN, {"role": "assistant", "content": "No."}],
    ),
    "a result in parts is one text": (
        [PLAIN, {"role": "tool", "name": "f", "content": [part("a"), part("b")]}],
        [PLAIN, {"role": "tool", "name": "f", "content": "a\nb"}],
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_two_ways_to_say_the_same(name: str) -> None:
    one, other = SAME[name]
    assert prompt_ids(NANO, one) == prompt_ids(NANO, other)


def test_a_greeting_may_come_before_the_first_question() -> None:
    """tau2-bench sends system, assistant, user."""
    text = prompt_text(
        [{"role": "system", "content": "S"}, {"role": "assistant", "content": "Hello!"}, PLAIN]
    )
    assert text.index("Hello!") < text.index("user name=user\nHi")


def test_arguments_that_are_no_json_reach_the_prompt_as_they_are() -> None:
    """vllm-project/vllm#43995, #48922; ggml-org/llama.cpp#25510."""
    for arguments in ('{"value": ', "{", "not json", "[1]", "\\"):
        call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
        text = prompt_text([PLAIN, {"role": "assistant", "tool_calls": [call]}])
        assert f'{{"name": "f", "arguments": {arguments}}}\n' in text


def test_an_image_in_a_tools_result_is_refused_and_not_dropped() -> None:
    parts = [part("a", name="f"), {"type": "image_url", "name": "g"}]
    with pytest.raises(RequestError, match="reads text only"):
        prompt_ids(NANO, [PLAIN, {"role": "tool", "content": parts}])
