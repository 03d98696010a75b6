"""Any thought, any budget, tags of one token or spelled: closed once, cleanly, counted exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import m1serve.model
from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.chat.reply import count_reasoning_tokens, parse_reply
from m1serve.chat.tokenizer import CONTROL, ChatTokenizer
from m1serve.engine.stopping import ThinkBudget
from m1serve.engine.thinking import ThinkBlock, ThinkPlace

KINDS = ["nano", "bytes", "spelled bytes", "spelled by M1"]
END = "</think>"


def m1_vocabulary(merges_file: Path) -> ChatTokenizer:
    """M1's own merges, whose tags are several tokens, and its control tokens."""
    lines = merges_file.read_text(encoding="utf-8").split("\n")[1:]
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines if line)]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    vocab = {token: place for place, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in CONTROL])
    return ChatTokenizer(tokenizer.to_str())


@pytest.fixture(scope="module", params=KINDS)
def either(request: pytest.FixtureRequest) -> ChatTokenizer:
    if request.param == "nano":
        return ChatTokenizer.load(Path(m1serve.model.__file__).parent / "nano")
    if request.param == "spelled by M1":
        data: Path = request.getfixturevalue("m1_data")
        return m1_vocabulary(data / "merges.txt")
    return byte_tokenizer() if request.param == "bytes" else byte_tokenizer(tags=())


def said_under(tok: ChatTokenizer, script: str, budget: int, prompt: str) -> tuple[list[int], int]:
    """What is said until the block is closed, and how much of it was forced."""
    rule = ThinkBudget(budget, tokenizer=tok, prompt_ids=tuple(tok.encode_control(prompt)))
    said, num_forced = list[int](), 0
    for token_id in tok.encode_control(script):
        while rule.forced:
            said.append(rule.forced[0])
            rule.observe(rule.forced[0])
            num_forced += 1
        if num_forced:
            break
        said.append(token_id)
        rule.observe(token_id)
    return said, num_forced


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    thought=st.text(st.sampled_from("ab <>/\nthink漢"), max_size=30),
    budget=st.integers(0, 40),
    is_open=st.booleans(),
)
@example(thought="one</", budget=2, is_open=False)
@example(thought="", budget=1, is_open=False)
@example(thought="x" * 20, budget=0, is_open=True)
def test_a_budget_closes_any_thought_once_and_cleanly(
    either: ChatTokenizer, thought: str, budget: int, is_open: bool
) -> None:
    head = "" if is_open else "<think>"
    script = f"{head}{thought}{END}\nSo be it."
    said, num_forced = said_under(either, script, budget, "Go.<think>" if is_open else "Go.")
    text = either.decode(said)
    if not num_forced:
        assert text == script
        return
    closed, tag, rest = text.rpartition(END)
    assert (tag, rest) == (END, "\n")
    # nothing of a tag that had begun is left, nothing of the thought is lost
    begun = said[: len(said) - num_forced]
    assert len(begun) <= budget + (0 if is_open else len(either.encode_control(head)))
    as_said = either.decode(begun)
    is_in_tag = any(as_said.endswith(END[:size]) for size in range(2, len(END)))
    assert closed == (as_said[: as_said.rindex("</")] if is_in_tag else as_said)
    assert parse_reply("<think>" * is_open + text + "So.").content == "So."


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    head=st.sampled_from(["<think>", "\n\n<think>", "", " \n", "No. <think>"]),
    thought=st.text(st.sampled_from("ab <>/\nthink漢"), max_size=30),
    tail=st.sampled_from(["", "</think>", "</think>\nSo.", "</thin"]),
    is_open=st.booleans(),
)
def test_usage_and_engine_count_the_same_thought(
    either: ChatTokenizer, head: str, thought: str, tail: str, is_open: bool
) -> None:
    """`answer_tokens` and `usage.reasoning_tokens` are one count, wherever the tags were cut."""
    ids = either.encode_control(head + thought + tail)
    block = ThinkBlock(either, either.encode_control("Go.<think>\n" if is_open else "Go."))
    for token_id in ids:
        block.observe(token_id)
    counted = count_reasoning_tokens(either, ids, is_open=is_open)
    if block.place is ThinkPlace.BEFORE:
        # neither an answer nor a block yet
        assert counted == 0
    else:
        assert counted == block.num_tokens
