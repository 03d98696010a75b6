"""Compiling grammars: beside the event loop, within limits, remembered; and following tags."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from m1serve.chat.byte_tokenizer import byte_tokenizer
from m1serve.chat.grammar import (
    CallableTool,
    after_tag_grammar,
    calls_grammar,
    json_grammar,
)
from m1serve.chat.tokenizer import CONTROL, ChatTokenizer
from m1serve.engine.constraint import Constraint
from m1serve.engine.grammar_compiler import MAX_KEPT, MAX_STUCK, MAX_TEXT_BYTES, GrammarCompiler
from m1serve.errors import EngineError, OverloadedError, RequestError
from m1serve.types import GenerateRequest, Grammar, GrammarStart, Limits

TOK = byte_tokenizer()
OBJECT = Grammar(text=json_grammar(None))
TOOLS = [CallableTool(name="f", schema=None)]


def spelling_tokenizer() -> ChatTokenizer:
    """Its tags are several tokens, and some tokens run over a tag's end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(">", "Ċ"), (">", "{"), ("t", "h"), ("<", "/")]
    vocab = {t: i for i, t in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in CONTROL])
    return ChatTokenizer(tokenizer.to_str(), source="spelling")


@pytest_asyncio.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler(TOK)
    yield compiler
    compiler.close()


async def constraint(tok: ChatTokenizer, grammar: Grammar, prompt: str = "Hi") -> Constraint:
    compiler = GrammarCompiler(tok)
    request = GenerateRequest(
        id="r",
        prompt_ids=tuple(tok.encode_control(prompt)),
        limits=Limits(max_tokens=99),
        grammar=grammar,
    )
    made = (await compiler.constraints(request))()
    compiler.close()
    assert made is not None
    return made


def follow(constraint: Constraint, ids: list[int]) -> list[bool]:
    """Whether each token was drawn under a mask; all have to be allowed."""
    masked: list[bool] = []
    for place, token_id in enumerate(ids):
        assert constraint.allows(token_id), f"token {place} is not allowed"
        masked.append(constraint.is_masking)
        constraint.observe(token_id)
        assert constraint.error is None
    return masked


def may_end(constraint: Constraint, tok: ChatTokenizer) -> bool:
    return constraint.allows(tok.eos_id)


# ---- compiling -----------------------------------------------------------------------------------


async def test_the_loop_turns_while_a_grammar_compiles(compiler: GrammarCompiler) -> None:
    properties = {f"p{i}": {"type": "string"} for i in range(900)}
    slow = Grammar(text=json_grammar({"type": "object", "properties": properties}))
    job = asyncio.ensure_future(compiler.compile(slow))
    turns = 0
    while not job.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 10
    assert not job.result().is_error()


async def test_a_compiled_grammar_is_remembered_and_so_is_a_refusal(
    compiler: GrammarCompiler,
) -> None:
    assert await compiler.compile(OBJECT) is await compiler.compile(OBJECT)
    bad = Grammar(text="start: (", param="response_format")
    errors = []
    for _ in range(2):
        with pytest.raises(RequestError) as caught:
            await compiler.compile(bad)
        errors.append(caught.value)
    assert errors[0] is errors[1]
    assert errors[0].param == "response_format"


async def test_what_is_remembered_has_a_bound(compiler: GrammarCompiler) -> None:
    first = await compiler.compile(OBJECT)
    for i in range(MAX_KEPT):
        await compiler.compile(Grammar(text=f'start: "{i}"\n'))
    assert await compiler.compile(OBJECT) is not first


async def test_a_fallback_is_taken_when_the_first_does_not_compile(
    compiler: GrammarCompiler,
) -> None:
    grammar = Grammar(text="start: (", fallback='start: "a"\n')
    assert not (await compiler.compile(grammar)).is_error()


async def test_text_beyond_the_limit_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match="at most"):
        await compiler.compile(Grammar(text="start: " + " " * MAX_TEXT_BYTES + '"a"\n'))


async def test_a_grammar_that_takes_too_long_is_refused() -> None:
    compiler = GrammarCompiler(TOK, compile_s=0.0)
    with pytest.raises(RequestError):
        await compiler.compile(OBJECT)
    compiler.close()


async def test_a_compiler_that_was_stuck_works_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, go_on = GrammarCompiler(TOK, compile_s=0.05), threading.Event()
    await compiler.compile(OBJECT)
    whole = compiler._compile

    def slow(grammar: Grammar) -> object:
        go_on.wait(30)
        return whole(grammar)

    monkeypatch.setattr(compiler, "_compile", slow)
    for number in range(MAX_STUCK):
        with pytest.raises(RequestError, match="does not compile within"):
            await compiler.compile(Grammar(text=f'start: "{number}"\n'))
    with pytest.raises(OverloadedError):
        await compiler.compile(Grammar(text='start: "x"\n'))
    monkeypatch.setattr(compiler, "_compile", whole)
    go_on.set()
    async with asyncio.timeout(20):
        while compiler._num_stuck:  # noqa: ASYNC110 - threads come back, no event behind it
            await asyncio.sleep(0.01)
    compiler._compile_s = 20.0
    assert not (await compiler.compile(Grammar(text='start: "x"\n'))).is_error()
    compiler.close()


async def test_a_closed_compiler_says_so(compiler: GrammarCompiler) -> None:
    compiler.close()
    with pytest.raises(EngineError, match="closed"):
        await compiler.compile(OBJECT)


async def test_references_as_deep_as_the_limits_let_through_compile(
    compiler: GrammarCompiler,
) -> None:
    # on a thread's usual stack this chain ends the process
    definitions: dict[str, Any] = {"d1000": {"type": "string"}}
    for i in range(1000):
        definitions[f"d{i}"] = {
            "type": "object",
            "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}},
        }
    schema = {"$ref": "#/$defs/d0", "$defs": definitions}
    assert not (await compiler.compile(Grammar(text=json_grammar(schema)))).is_error()


async def test_the_tool_whose_schema_does_not_compile_is_named(compiler: GrammarCompiler) -> None:
    bad = CallableTool(name="g", schema={"type": "object", "enum": []})
    grammar = Grammar(text=calls_grammar([*TOOLS, bad], max_calls=2), param="tools")
    with pytest.raises(RequestError) as caught:
        await compiler.compile(grammar)
    assert caught.value.param == "tools[1].function.parameters"
    assert "Unsatisfiable" in str(caught.value)


# ---- following -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tok", [TOK, spelling_tokenizer()], ids=["tags", "spelled tags"])
async def test_thinking_is_free_and_the_answer_is_not(tok: ChatTokenizer) -> None:
    bound = await constraint(tok, OBJECT)
    thought = tok.encode_control("<think>\nA {brace} and a </thin\n")
    opening = len(tok.encode_control("<think>"))
    masked = follow(bound, thought)
    # the last letters of the opening tag may come with what the thought begins with
    assert all(masked[: opening - 1])
    assert not any(masked[opening + 1 : -8])
    follow(bound, tok.encode_control("</think>\n"))
    assert all(follow(bound, tok.encode_control('{"a": [1]}')))
    assert may_end(bound, tok)


async def test_a_token_may_not_run_over_the_end_of_a_thought() -> None:
    tok = spelling_tokenizer()
    bound = await constraint(tok, OBJECT, prompt="Hi<think>\n")
    follow(bound, tok.encode_control("ok</think"))
    over = tok.encode_control(">{")
    assert len(over) == 1
    assert not bound.allows(over[0])
    line = tok.encode_control(">\n")
    assert len(line) == 1
    follow(bound, [*line, *tok.encode_control("{}")])
    assert may_end(bound, tok)


async def test_without_a_thought_the_first_token_is_bound() -> None:
    bound = await constraint(TOK, OBJECT)
    assert not bound.allows(TOK.encode_text("H")[0])
    assert not may_end(bound, TOK)
    assert all(follow(bound, TOK.encode_text("{}")))
    assert may_end(bound, TOK)


async def test_control_tokens_are_never_allowed_under_a_grammar() -> None:
    bound = await constraint(TOK, OBJECT)
    follow(bound, TOK.encode_text('{"'))
    for name in CONTROL:
        assert not bound.allows(TOK.control_ids[name])
    # spelled out they are text like any other
    follow(bound, TOK.encode_text('<end_of_sentence>": 1}'))


@pytest.mark.parametrize("tok", [TOK, spelling_tokenizer()], ids=["tags", "spelled tags"])
async def test_calls_bind_from_their_tag_on(tok: ChatTokenizer) -> None:
    grammar = Grammar(text=after_tag_grammar(TOOLS, max_calls=1), start=GrammarStart.CALLS)
    bound = await constraint(tok, grammar)
    free = "<think>\n<tool_calls> is a tag\n</think>\nI look <b>."
    assert not any(follow(bound, tok.encode_control(free)))
    assert may_end(bound, tok)
    follow(bound, tok.encode_control("<tool_calls>\n"))
    assert not may_end(bound, tok)
    line = '{"name": "f", "arguments": {"q": "</tool_calls>"}}'
    assert all(follow(bound, tok.encode_text(f"{line}\n")))
    assert not bound.allows(tok.encode_text("{")[0])
    assert all(follow(bound, tok.encode_control("</tool_calls>")))
    assert may_end(bound, tok)
    assert not bound.allows(tok.encode_text("a")[0])


async def test_whitespace_has_a_bound() -> None:
    bound = await constraint(TOK, OBJECT)
    follow(bound, TOK.encode_text("{" + " " * 40))
    assert not bound.allows(TOK.encode_text(" ")[0])
    pretty = json.dumps({"a": {"b": [1, {"c": None}]}}, indent=4)
    follow(await constraint(TOK, OBJECT), TOK.encode_text(pretty))


async def test_ending_a_thought_forces_its_tag() -> None:
    bound = await constraint(TOK, OBJECT, prompt="<think>\n")
    assert bound.is_thinking
    bound.consider(TOK.encode_text("a")[0])
    assert bound.forced == []
    bound.consider(TOK.eos_id)
    assert bound.forced == TOK.encode_control("</think>\n")
    for token_id in list(bound.forced):
        bound.observe(token_id)
    assert not bound.is_thinking
    follow(bound, TOK.encode_text("{}"))
