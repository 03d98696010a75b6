from m1serve.chat.history import HistoryIndex
from m1serve.chat.messages import ChatMessage
from m1serve.chat.template import encode_extension, encode_prompt
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.types import ToolCall

USER = ChatMessage(role="user", content="u")
NEXT = ChatMessage(role="user", content="v")


def answer(content: str, *calls: ToolCall, reasoning: str | None = None) -> ChatMessage:
    return ChatMessage(role="assistant", content=content, tool_calls=calls, reasoning=reasoning)


def sampled(tok: ChatTokenizer, text: str, *, closed: bool = True) -> tuple[int, ...]:
    end = "<end_of_sentence>" if closed else ""
    return (*encode_prompt(tok, [USER], []).ids, *tok.encode_control(text + end))


def test_the_next_prompt_begins_with_the_sampled_ids(tok: ChatTokenizer) -> None:
    index = HistoryIndex(tok)
    ids = sampled(tok, "<think>\nhm\n</think>\nHello")
    index.remember("t", "m", [USER, answer("Hello", reasoning="hm")], [], ids)
    prompt, is_found = index.prompt("t", "m", [USER, answer("Hello"), NEXT], [])
    assert is_found
    assert prompt.ids == (*ids, *encode_extension(tok, True, [NEXT]))


def test_a_turn_cut_by_length_is_closed_first(tok: ChatTokenizer) -> None:
    index = HistoryIndex(tok)
    ids = sampled(tok, "Hel", closed=False)
    index.remember("t", "m", [USER, answer("Hel")], [], ids)
    prompt, _ = index.prompt("t", "m", [USER, answer("Hel"), NEXT], [])
    assert prompt.ids[: len(ids) + 1] == (*ids, tok.eos_id)


def test_anything_edited_is_rendered_from_text(tok: ChatTokenizer) -> None:
    index = HistoryIndex(tok)
    index.remember("t", "m", [USER, answer("Hello")], [], sampled(tok, "Hello"))
    for tenant, alias, messages, tools in [
        ("t", "m", [USER, answer("Hallo"), NEXT], []),
        ("other", "m", [USER, answer("Hello"), NEXT], []),
        ("t", "other", [USER, answer("Hello"), NEXT], []),
        ("t", "m", [NEXT, answer("Hello"), NEXT], []),
        ("t", "m", [USER, answer("Hello"), NEXT], [{"name": "f"}]),
        ("t", "m", [USER, answer("Hello"), NEXT, ChatMessage(role="system", content="s")], []),
    ]:
        prompt, is_found = index.prompt(tenant, alias, messages, tools)
        assert not is_found
        assert prompt == encode_prompt(tok, messages, tools)


def test_arguments_match_as_json(tok: ChatTokenizer) -> None:
    index = HistoryIndex(tok)
    ours = answer("", ToolCall(name="f", arguments='{"a": 1, "b": 2}', id="c"))
    theirs = answer("", ToolCall(name="f", arguments='{"b":2,"a":1}', id="c"))
    index.remember("t", "m", [USER, ours], [], sampled(tok, "x"))
    assert index.prompt("t", "m", [USER, theirs, NEXT], [])[1]


def test_lookalikes_are_told_apart_by_call_id_then_reasoning_then_session(
    tok: ChatTokenizer,
) -> None:
    index = HistoryIndex(tok)
    for number in range(3):
        message = answer(
            "", ToolCall(name="f", arguments="{}", id=f"c{number}"), reasoning=f"r{number}"
        )
        ids = sampled(tok, f"<think>\nr{number}\n</think>\n")
        index.remember("t", "m", [USER, message], [], ids, session_id=f"s{number}")

    def found(call_id: str, session_id: str | None, reasoning: str | None) -> str | None:
        message = answer("", ToolCall(name="f", arguments="{}", id=call_id), reasoning=reasoning)
        match = index.match("t", "m", [USER, message, NEXT], [], session_id=session_id)
        return match.parent_session_id

    assert found("c1", "s0", "r2") == "s1"
    assert found("unknown", "s0", "r1") == "s1"
    assert found("unknown", None, "r1 \n") == "s1"
    assert found("unknown", "s0", None) == "s0"
    # nothing tells: the text is rendered, and nobody's thoughts are in the prompt
    assert found("unknown", None, None) is None
    assert found("unknown", "elsewhere", None) is None


def test_a_thought_that_was_replaced_is_nobodys(tok: ChatTokenizer) -> None:
    index = HistoryIndex(tok)
    ids = sampled(tok, "<think>\nsecret\n</think>\nHello")
    index.remember("t", "m", [USER, answer("Hello", reasoning="secret")], [], ids, session_id="s1")
    replayed = [USER, answer("Hello", reasoning="another"), NEXT]
    for session_id in ("s1", "s2", None):
        match = index.match("t", "m", replayed, [], session_id=session_id)
        assert match.num_exact_ids == 0
        assert "secret" not in tok.decode(match.prompt.ids)


def test_the_oldest_turns_go_when_the_memory_is_full(tok: ChatTokenizer) -> None:
    index = HistoryIndex(tok, max_bytes=10_000)
    for number in range(50):
        index.remember("t", "m", [USER, answer(str(number))], [], sampled(tok, str(number)))
    assert 0 < len(index) < 20
    assert index.prompt("t", "m", [USER, answer("49"), NEXT], [])[1]
    assert not index.prompt("t", "m", [USER, answer("0"), NEXT], [])[1]
