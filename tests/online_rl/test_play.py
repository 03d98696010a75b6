"""Episodes over an engine: the careful clerk, played as a script, must win every family."""

from __future__ import annotations

import json
import random
from dataclasses import replace

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings, GateSettings
from m1serve.engine.script import ScriptedReply
from m1serve.engine.scripted import ScriptedEngine
from m1serve.envs import FAMILIES, make_task, max_turns, task_ids
from m1serve.envs.base import build_problem
from m1serve.envs.clerk import play
from m1serve.envs.saying import Call, Say
from m1serve.online_rl.play import PlayedEpisode, play_episode, play_episodes
from m1serve.online_rl.scorers.sandbox import Sandbox
from m1serve.online_rl.suite import (
    exam_digest,
    first_look,
    mean_kl,
    play_suite,
    score_suite,
    second_look,
)
from m1serve.types import GenerateRequest, StopCause


def clerk_reply(request: GenerateRequest) -> ScriptedReply:
    _, task_id, number = request.id.split(":")
    said = play(build_problem(task_id), random.Random(task_id)).said
    return ScriptedReply(text=written(said[int(number)]))


def written(say: Say) -> str:
    calls = "".join(
        json.dumps({"name": c.name, "arguments": dict(c.arguments)}) + "\n" for c in say.calls
    )
    block = f"<tool_calls>\n{calls}</tool_calls>" if calls else ""
    return f"<think>\n{say.thought}\n</think>\n{say.content}{block}"


def engine_of(tok: ChatTokenizer, **settings: int) -> ScriptedEngine:
    return ScriptedEngine(
        clerk_reply, tokenizer=tok, settings=EngineSettings(kind="scripted", **settings)
    )


async def test_the_careful_clerk_is_always_right(tok: ChatTokenizer) -> None:
    ids = [t for f in FAMILIES for t in task_ids("gate", f, 2)]
    episodes = await play_episodes(engine_of(tok, max_model_len=8192), tok, ids)
    assert [e.task_id for e in episodes] == ids
    with Sandbox(timeout_s=20.0, memory_bytes=2**31) as sandbox:
        results = score_suite(episodes, sandbox)
    assert [(r.task_id, r.is_solved) for r in results if r.is_solved is not True] == []
    assert all(r.num_well_formed == r.num_turns for r in results)


async def test_history_is_exact(tok: ChatTokenizer) -> None:
    task_id = next(
        t
        for t in task_ids("gate", "refund", 20)
        if len(play(build_problem(t), random.Random(t)).said) > 1
    )
    episode = await play_episode(engine_of(tok, max_model_len=8192), tok, task_id)
    assert len(episode.turns) > 1
    for before, after in zip(episode.turns, episode.turns[1:], strict=False):
        seen = (*before.prompt_ids, *before.completion_ids)
        assert after.prompt_ids[: len(seen)] == seen
        assert "tool result" in tok.decode(after.prompt_ids[len(seen) :])
    assert all(t.completion_ids[-1] == tok.eos_id for t in episode.turns)
    assert all(len(t.logprobs) == len(t.completion_ids) for t in episode.turns)


async def test_an_endless_agent_is_cut_after_its_turns(tok: ChatTokenizer) -> None:
    call = written(Say(thought="again", calls=(Call(name="calculator", arguments={}),)))
    engine = ScriptedEngine(
        lambda request: ScriptedReply(text=call),
        tokenizer=tok,
        settings=EngineSettings(kind="scripted", max_model_len=8192),
    )
    task_id = task_ids("gate", "calc", 1)[0]
    episode = await play_episode(engine, tok, task_id)
    assert len(episode.turns) == max_turns(task_id)


async def test_a_ruined_agent_gets_errors_for_calls_that_are_no_json(tok: ChatTokenizer) -> None:
    broken = (
        "<think>\nx\n</think>\n"
        '<tool_calls>\n{"name": "calculator", "arguments": {"a": "1\n</tool_calls>'
    )
    engine = ScriptedEngine(
        lambda request: ScriptedReply(text=broken),
        tokenizer=tok,
        settings=EngineSettings(kind="scripted", max_model_len=8192),
    )
    episode = await play_episode(engine, tok, task_ids("gate", "calc", 1)[0])
    assert not episode.turns[0].turn.is_well_formed
    assert "arguments are not a JSON object" in tok.decode(episode.turns[1].prompt_ids)


async def test_a_turn_without_room_ends_the_episode(tok: ChatTokenizer) -> None:
    task_id = task_ids("gate", "sums", 1)[0]
    room = len((await play_episode(engine_of(tok), tok, task_id)).turns[0].prompt_ids)
    cut = await play_episode(engine_of(tok, max_model_len=room + 3), tok, task_id)
    assert len(cut.turns) == 1
    assert cut.turns[0].turn.stop in (StopCause.LENGTH, StopCause.CONTEXT)
    none = await play_episode(engine_of(tok, max_model_len=room), tok, task_id)
    assert none == PlayedEpisode(task_id=task_id, turns=())


def test_other_texts_are_another_suite() -> None:
    tasks = [make_task(t) for t in task_ids("gate", "sums", 3)]
    digest = exam_digest(tasks, 256)
    settings = GateSettings(tasks_per_family=3, families=("sums",))
    for look in (first_look(settings), second_look(settings, ["sums"])):
        assert look.name.endswith(f"/{digest}")
    reworded = [*tasks[:2], replace(tasks[2], system="Be brief.")]
    assert exam_digest(reworded, 256) != digest


async def test_a_turn_of_the_suite_is_cut_where_the_settings_say(tok: ChatTokenizer) -> None:
    settings = GateSettings(tasks_per_family=2, families=("sums",), max_turn_tokens=5)
    episodes = await play_suite(engine_of(tok), tok, first_look(settings))
    assert [len(e.turns[0].completion_ids) for e in episodes] == [5, 5]
    assert all(e.turns[0].turn.stop is StopCause.LENGTH for e in episodes)


async def test_kl_to_oneself_is_nothing(tok: ChatTokenizer) -> None:
    engine = engine_of(tok)
    episodes = await play_episodes(engine, tok, task_ids("gate", "sums", 3))
    assert abs(await mean_kl(engine, episodes)) < 1e-9


def test_the_suite_is_the_gate_split_and_its_name_tells_it() -> None:
    settings = GateSettings(tasks_per_family=3, families=("sums", "calc"))
    first, second = first_look(settings), second_look(settings, ["calc"])
    assert [(f, len(ids)) for f, ids in first.tasks.items()] == [("sums", 3), ("calc", 3)]
    assert [(f, len(ids)) for f, ids in second.tasks.items()] == [("calc", 6)]
    assert all(t.split("/")[1] == "gate" for ids in first.tasks.values() for t in ids)
    assert not set(first.tasks["calc"]) & set(second.tasks["calc"])
    other = first_look(GateSettings(families=("sums", "calc")))
    short = first_look(settings.model_copy(update={"max_turn_tokens": 99}))
    assert len({first.name, second.name, other.name, short.name}) == 4
    again = first_look(GateSettings(tasks_per_family=3, families=("calc", "sums")))
    assert again.name == first.name
    assert set(first_look(GateSettings()).tasks) == set(FAMILIES)
