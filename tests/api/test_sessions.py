"""Sessions, exact histories and what the journal gets."""

from typing import Any

import httpx
import pytest

from m1serve.chat.messages import ChatMessage
from m1serve.chat.template import encode_extension, encode_prompt
from m1serve.store.records import FeedbackGiven, SessionEnded
from m1serve.types import HistoryRule, Mode, StopCause, VersionSpan

HI: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CALL = '<think>\nhm\n</think>\n<tool_calls>\n{"name": "look", "arguments": {"x":1}}\n</tool_calls>'


async def ask(world: Any, messages: Any = HI, headers: Any = None, **more: Any) -> Any:
    return await world.client.chat.completions.with_raw_response.create(
        model="fake", messages=messages, extra_headers=headers, **more
    )


async def test_a_record_has_exactly_what_the_engine_emitted(serve: Any) -> None:
    async with serve("<think>\nhm\n</think>\nHello, world.") as world:
        world.engine.versions = ["fake@0", "fake@1"]
        answer = await ask(world, headers={"x-stainless-retry-count": "2"})
        [turn] = world.turns
        [request] = world.engine.requests
        deltas = world.engine.sent[request.id, 0]
    assert turn.prompt_ids == request.prompt_ids
    assert turn.completion_ids == tuple(i for d in deltas for i in d.token_ids)
    assert turn.logprobs == tuple(p for d in deltas for p in d.logprobs)
    assert turn.token_flags == tuple(f for d in deltas for f in d.token_flags)
    assert turn.version_spans == (
        VersionSpan(start=0, end=12, weights_version="fake@0"),
        VersionSpan(start=12, end=len(turn.completion_ids), weights_version="fake@1"),
    )
    assert turn.sampling == request.sampling
    assert (turn.stop, turn.finish_reason, turn.was_delivered) == (StopCause.EOS, "stop", True)
    assert (turn.mode, turn.history_rule) == (Mode.TRAIN, HistoryRule.EXACT)
    assert turn.retry_count == 2
    assert turn.turn_id == answer.headers["x-m1-turn-id"]
    assert turn.session_id == answer.headers["x-m1-session-id"]
    assert turn.request_id.startswith(answer.headers["x-request-id"])
    assert turn.tokenizer_digest == world.tok.digest
    assert answer.headers["x-m1-weights-version"] == "fake@1"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_next_prompt_extends_the_sampled_ids_and_joins_the_session(
    serve: Any, is_stream: bool
) -> None:
    async with serve(CALL, "Done.") as world:
        if is_stream:
            async with world.client.chat.completions.stream(
                model="fake", messages=HI, tools=TOOLS
            ) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            message = (await ask(world, tools=TOOLS)).parse().choices[0].message
        call = message.tool_calls[0]
        replayed = {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"x": 1}'},
                }
            ],
        }
        result = {"role": "tool", "tool_call_id": call.id, "content": "found"}
        await ask(world, [*HI, replayed, result], tools=TOOLS)
        first, second = world.turns
    new = [ChatMessage(role="tool", content="found", name="look")]
    expected = (*first.prompt_ids, *first.completion_ids)
    assert second.prompt_ids == (*expected, *encode_extension(world.tok, True, new))
    assert second.session_id == first.session_id


async def test_an_edited_history_is_rendered_and_starts_a_session(serve: Any) -> None:
    async with serve("Hello.") as world:
        await ask(world)
        edited = [*HI, {"role": "assistant", "content": "Hallo."}, *HI]
        await ask(world, edited)
        first, second = world.turns
    messages = [ChatMessage(role=m["role"], content=m["content"]) for m in edited]
    assert second.prompt_ids == encode_prompt(world.tok, messages, []).ids
    assert second.session_id != first.session_id


async def test_under_the_template_rule_nothing_is_spliced(serve: Any) -> None:
    model = {"model_id": "fake", "history": "template"}
    async with serve("<think>\nhm\n</think>\nHello.", model=model) as world:
        await ask(world)
        await ask(world, [*HI, {"role": "assistant", "content": "Hello."}, *HI])
        turn = world.turns[1]
    assert turn.history_rule is HistoryRule.TEMPLATE
    assert "hm" not in world.tok.decode(turn.prompt_ids)


async def test_labels_come_from_headers_before_metadata(serve: Any) -> None:
    metadata = {"m1_session": "s-meta", "task_id": "t-meta", "group_id": "g-meta"}
    async with serve() as world:
        await ask(world, metadata=metadata)
        headers = {"X-M1-Session-Id": "s", "X-M1-Task-Id": "t", "X-M1-Group-Id": "g"}
        answer = await ask(world, headers=headers, metadata=metadata)
        meta, head = world.turns
    assert (meta.session_id, meta.task_id, meta.group_key) == ("s-meta", "t-meta", "g-meta")
    assert (head.session_id, head.task_id, head.group_key) == ("s", "t", "g")
    assert answer.headers["x-m1-session-id"] == "s"


async def test_lookalike_sessions_keep_their_own_thoughts(serve: Any) -> None:
    async with serve("<think>\na\n</think>\nHi", "<think>\nb\n</think>\nHi", "x") as world:
        for session in ("s1", "s2"):
            await ask(world, headers={"x-m1-session-id": session})
        again = [*HI, {"role": "assistant", "content": "Hi"}, *HI]
        for session in ("s1", "s2"):
            await ask(world, again, headers={"x-m1-session-id": session})
        first, second, third, fourth = world.turns
    assert third.prompt_ids[: len(first.prompt_ids) + len(first.completion_ids)] == (
        *first.prompt_ids,
        *first.completion_ids,
    )
    assert fourth.prompt_ids[: len(second.prompt_ids) + len(second.completion_ids)] == (
        *second.prompt_ids,
        *second.completion_ids,
    )


async def test_a_session_may_be_named_like_a_task(serve: Any) -> None:
    async with serve() as world, httpx.AsyncClient(verify=False) as http:
        answer = await http.post(f"{world.url}/v1/sessions/lookup/train/5/end")
        assert answer.status_code == 200
        [end] = world.journal
    assert end.session_id == "lookup/train/5"


async def test_choices_of_one_request_are_a_group_of_turns(serve: Any) -> None:
    async with serve("a", "b", "x") as world:
        answer = await ask(world, n=2)
        turns = world.turns
    assert [turn.choice for turn in turns] == [0, 1]
    assert len({turn.turn_id for turn in turns}) == 2
    assert {turn.group_key for turn in turns} == {turns[0].request_id}
    assert turns[0].request_id.startswith(answer.headers["x-request-id"])
    assert answer.headers["x-m1-turn-id"].split(",") == [turn.turn_id for turn in turns]


async def test_a_client_that_names_all_its_requests_alike_still_makes_many(serve: Any) -> None:
    async with serve("a", "b", "c", "d", is_behind_proxy=True) as world:
        for _ in range(2):
            await ask(world, n=2, headers={"x-request-id": "always-the-same"})
        turns = world.turns
    assert [turn.choice for turn in turns] == [0, 1, 0, 1]
    assert len({turn.request_id for turn in turns}) == 2
    assert len({turn.group_key for turn in turns}) == 2


@pytest.mark.parametrize(
    ("headers", "more", "modes"),
    [
        ({"x-m1-mode": "eval"}, {}, [Mode.EVAL]),
        ({"x-m1-mode": "off"}, {}, []),
        ({}, {"store": False}, []),
        ({"x-m1-mode": "train"}, {"store": False}, []),
        ({}, {"store": True}, [Mode.TRAIN]),
    ],
)
async def test_the_mode_says_what_is_kept(
    serve: Any, headers: Any, more: Any, modes: list[Mode]
) -> None:
    async with serve() as world:
        answer = await ask(world, headers=headers, **more)
        assert [turn.mode for turn in world.turns] == modes
    assert answer.headers["x-m1-session-id"].startswith("sess-")


async def test_an_unknown_mode_is_refused(serve: Any) -> None:
    async with serve() as world, httpx.AsyncClient(verify=False) as http:
        answer = await http.post(
            f"{world.url}/v1/chat/completions",
            json={"model": "fake", "messages": HI},
            headers={"x-m1-mode": "maybe"},
        )
    assert answer.status_code == 400
    assert "train, eval or off" in answer.json()["error"]["message"]


async def test_equal_requests_have_equal_hashes(serve: Any) -> None:
    async with serve() as world:
        await ask(world)
        async for _ in await world.client.chat.completions.create(
            model="fake", messages=HI, stream=True
        ):
            pass
        await ask(world, temperature=0.5)
        first, second, third = world.turns
    assert first.request_hash == second.request_hash != third.request_hash


async def test_feedback_and_ends_of_sessions_reach_the_journal(serve: Any) -> None:
    async with serve() as world, httpx.AsyncClient(verify=False) as http:
        given = await http.post(
            f"{world.url}/v1/feedback", json={"session_id": "s", "value": 1, "comment": "good"}
        )
        ended = await http.post(f"{world.url}/v1/sessions/s/end")
        for bad in ({"value": 1}, {"session_id": "s", "value": "1"}, {"session_id": "s"}):
            assert (await http.post(f"{world.url}/v1/feedback", json=bad)).status_code == 400
        feedback, end = world.journal
    assert isinstance(feedback, FeedbackGiven)
    assert (feedback.session_id, feedback.value, feedback.comment) == ("s", 1.0, "good")
    assert given.json()["id"] == feedback.feedback_id
    assert isinstance(end, SessionEnded)
    assert (end.session_id, end.reason) == ("s", "end")
    assert ended.status_code == 200
