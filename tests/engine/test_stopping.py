"""When a choice ends, and the reasoning budget."""

from __future__ import annotations

from typing import Any

import pytest

from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.engine.stopping import Stop, StopRules, ThinkBudget
from m1serve.types import GenerateRequest, Limits, Sampling, StopCause


def rules(tok: ChatTokenizer, *, max_tokens: int = 10, room: int = 100, **fields: Any) -> StopRules:
    request = GenerateRequest(
        id="r", prompt_ids=(5, 6), limits=Limits(max_tokens=max_tokens), **fields
    )
    return StopRules(request, tokenizer=tok, max_model_len=2 + room)


def stop_of(rule: StopRules, ids: list[int]) -> tuple[int, Stop | None]:
    """How many tokens were said, and why it ended."""
    for num, token_id in enumerate(ids, start=1):
        if (stop := rule.after(token_id, num, -1.0)) is not None:
            return num, stop
    return len(ids), None


def test_the_limit_that_comes_first_names_the_cause(tok: ChatTokenizer) -> None:
    ids = tok.encode_text("The order is pending and will be cancelled.")
    assert stop_of(rules(tok, max_tokens=3), ids) == (3, Stop(cause=StopCause.LENGTH))
    assert stop_of(rules(tok, max_tokens=50, room=3), ids) == (3, Stop(cause=StopCause.CONTEXT))
    assert stop_of(rules(tok, max_tokens=3, room=3), ids) == (3, Stop(cause=StopCause.LENGTH))


def test_the_end_of_sentence_wins_over_the_limit(tok: ChatTokenizer) -> None:
    assert stop_of(rules(tok, max_tokens=1), [tok.eos_id]) == (1, Stop(cause=StopCause.EOS))


def test_naming_the_end_of_sentence_as_stop_token_changes_nothing(tok: ChatTokenizer) -> None:
    rule = rules(tok, sampling=Sampling(stop_token_ids=(tok.eos_id,)))
    assert stop_of(rule, [tok.eos_id]) == (1, Stop(cause=StopCause.EOS))


def test_a_stop_string_may_span_tokens(tok: ChatTokenizer) -> None:
    ids = [i for char in "say stop now" for i in tok.encode_text(char)]
    rule = rules(tok, max_tokens=50, stop_strings=("stop", "never"))
    assert stop_of(rule, ids) == (8, Stop(cause=StopCause.STOP_STRING, detail="stop"))


def test_a_stop_string_may_be_more_than_ascii(tok: ChatTokenizer) -> None:
    ids = tok.encode_text("schön")
    num, stop = stop_of(rules(tok, max_tokens=50, stop_strings=("ö",)), ids)
    assert stop == Stop(cause=StopCause.STOP_STRING, detail="ö")
    assert tok.decode(ids[:num]).endswith("ö")


def test_no_tokens_at_all_is_decided_before_the_first(tok: ChatTokenizer) -> None:
    assert rules(tok, max_tokens=0).before_any() == Stop(cause=StopCause.LENGTH)
    assert rules(tok).before_any() is None


def think(tok: ChatTokenizer, budget: int, prompt: str = "") -> ThinkBudget:
    return ThinkBudget(budget, tokenizer=tok, prompt_ids=tuple(tok.encode_control("a" + prompt)))


def test_the_budget_counts_tokens_inside_the_block_only(tok: ChatTokenizer) -> None:
    budget = think(tok, 3)
    for token_id in (*tok.encode_text("\n"), tok.control_ids["<think>"]):
        budget.observe(token_id)
    for token_id in (10, 11):
        budget.observe(token_id)
        assert budget.forced == []
    budget.observe(12)
    assert budget.forced == tok.encode_control("</think>\n")


def test_forced_tokens_come_one_by_one_and_then_no_more(tok: ChatTokenizer) -> None:
    budget = think(tok, 1, "<think>\n")
    budget.observe(10)
    while budget.forced:
        budget.observe(budget.forced[0])
    for token_id in range(20, 30):
        budget.observe(token_id)
        assert budget.forced == []


def test_a_block_closed_in_time_is_left_alone(tok: ChatTokenizer) -> None:
    budget = think(tok, 2, "<think>")
    for token_id in (10, tok.control_ids["</think>"], 11, 12, 13):
        budget.observe(token_id)
        assert budget.forced == []


@pytest.mark.parametrize("prompt", ["<think>", "<think>\n"])
def test_no_budget_in_an_open_block_forces_at_once(tok: ChatTokenizer, prompt: str) -> None:
    assert think(tok, 0, prompt).forced == tok.encode_control("</think>\n")


def test_a_tag_in_the_answer_opens_no_block(tok: ChatTokenizer) -> None:
    budget = think(tok, 1)
    for token_id in tok.encode_control("So. <think> is a tag"):
        budget.observe(token_id)
        assert budget.forced == []


def spelled(tok: ChatTokenizer, text: str) -> list[int]:
    """Tags in several tokens each, as a tokenizer without them has it."""
    return [i for char in text for i in tok.encode_text(char)]


def test_a_block_whose_tags_are_several_tokens_is_closed_too(tok: ChatTokenizer) -> None:
    budget = think(tok, 2)
    for token_id in (*spelled(tok, "<think>"), 10):
        budget.observe(token_id)
        assert budget.forced == []
    budget.observe(11)
    assert budget.forced == tok.encode_control("</think>\n")


@pytest.mark.parametrize(
    ("thought", "rest"),
    [
        ("a <", "</think>\n"),
        ("a b</", "think>\n"),
        ("a b</thi", "nk>\n"),
        ("a b</think", ">\n"),
        ("a b</thin ", "</think>\n"),
        ("</", "think>\n"),
    ],
)
def test_of_an_end_tag_that_has_begun_only_the_rest_is_forced(thought: str, rest: str) -> None:
    tok = byte_tokenizer(tags=())
    ids = tok.encode_control(thought)
    budget = ThinkBudget(len(ids), tokenizer=tok, prompt_ids=tuple(tok.encode_text("a<think>")))
    for token_id in ids:
        assert budget.forced == []
        budget.observe(token_id)
    assert tok.decode(budget.forced) == rest
    while budget.forced:
        budget.observe(budget.forced[0])
    for token_id in tok.encode_control("So </th"):
        budget.observe(token_id)
        assert budget.forced == []


def test_tags_of_several_tokens_end_the_block_in_time(tok: ChatTokenizer) -> None:
    budget = think(tok, 30)
    for token_id in (*spelled(tok, "<think>hm</think>"), *range(20, 60)):
        budget.observe(token_id)
        assert budget.forced == []


@pytest.mark.parametrize("thought", ["", "<think>\nhm, well\n</think>", "\n\n<think>x</think>"])
@pytest.mark.parametrize("spell", [spelled, ChatTokenizer.encode_control])
def test_an_answers_limit_does_not_count_the_thought(
    tok: ChatTokenizer, thought: str, spell: Any
) -> None:
    before = spell(tok, thought)
    request = GenerateRequest(
        id="r", prompt_ids=(5, 6), limits=Limits(max_tokens=90, answer_tokens=4)
    )
    rule = StopRules(request, tokenizer=tok, max_model_len=200)
    ids = [*before, *tok.encode_text("a b c d e f g h")]
    assert stop_of(rule, ids) == (len(before) + 4, Stop(cause=StopCause.LENGTH))


def test_a_thought_that_never_ends_meets_max_tokens(tok: ChatTokenizer) -> None:
    request = GenerateRequest(
        id="r", prompt_ids=(5, 6), limits=Limits(max_tokens=9, answer_tokens=2)
    )
    rule = StopRules(request, tokenizer=tok, max_model_len=200)
    ids = tok.encode_control("<think>" + "on and on " * 9)
    assert stop_of(rule, ids) == (9, Stop(cause=StopCause.LENGTH))
