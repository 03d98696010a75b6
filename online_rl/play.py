"""Plays tasks over an Engine as an agent would; what was sampled is never tokenised again."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from m1serve.chat.messages import ChatMessage
from m1serve.chat.reply import turn_from_ids
from m1serve.chat.template import encode_extension, encode_prompt
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.engine.base import Engine
from m1serve.envs import Episode, make_task, max_turns, open_episode, use_tool
from m1serve.types import Delta, GenerateRequest, Limits, Sampling, StopCause, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTurn:
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    turn: Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    task_id: str
    turns: tuple[PlayedTurn, ...]


async def play_episodes(
    engine: Engine,
    tok: ChatTokenizer,
    task_ids: Sequence[str],
    *,
    max_turn_tokens: int = 256,
    seed: int = 0,
) -> list[PlayedEpisode]:
    """As many at once as the engine has slots. With one seed every version meets the same luck."""
    slots = asyncio.Semaphore(engine.stats().num_slots)

    async def play(task_id: str) -> PlayedEpisode:
        async with slots:
            return await play_episode(
                engine, tok, task_id, max_turn_tokens=max_turn_tokens, seed=seed
            )

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play(task_id)) for task_id in task_ids]
    except ExceptionGroup as errors:
        # the first is what the reader of a run's reason needs
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


async def play_episode(
    engine: Engine,
    tok: ChatTokenizer,
    task_id: str,
    *,
    max_turn_tokens: int = 256,
    seed: int = 0,
) -> PlayedEpisode:
    """Until the model answers without a tool call, is cut short, or has had its turns."""
    task, episode = make_task(task_id), open_episode(task_id)
    messages = [
        ChatMessage(role="system", content=task.system),
        ChatMessage(role="user", content=task.user),
    ]
    rendered = encode_prompt(tok, messages, task.tools)
    prompt_ids, turns = rendered.ids, list[PlayedTurn]()
    for number in range(max_turns(task_id)):
        room = engine.capabilities.max_model_len - len(prompt_ids)
        if room < 1:
            break
        request = GenerateRequest(
            id=f"gate:{task_id}:{number}",
            prompt_ids=prompt_ids,
            limits=Limits(max_tokens=min(max_turn_tokens, room)),
            sampling=Sampling(seed=_seed(f"{seed}:{task_id}:{number}")),
            snapshot_at=(rendered.system_end,),
            min_delta_interval_s=math.inf,
        )
        played = await _play_turn(engine, tok, request)
        turns.append(played)
        if played.turn.stop is not StopCause.EOS or not played.turn.tool_calls:
            break
        results = _use_tools(episode, played.turn)
        extension = encode_extension(tok, True, results)
        prompt_ids = (*played.prompt_ids, *played.completion_ids, *extension)
    return PlayedEpisode(task_id=task_id, turns=tuple(turns))


async def _play_turn(engine: Engine, tok: ChatTokenizer, request: GenerateRequest) -> PlayedTurn:
    ids: list[int] = []
    logprobs: list[float] = []
    stop = StopCause.ERROR
    async for item in engine.generate(request):
        if isinstance(item, Delta):
            ids += item.token_ids
            logprobs += item.logprobs
            stop = item.stop or stop
    return PlayedTurn(
        prompt_ids=request.prompt_ids,
        completion_ids=tuple(ids),
        logprobs=tuple(logprobs),
        turn=turn_from_ids(tok, turn_id=request.id, completion_ids=ids, stop=stop),
    )


def _use_tools(episode: Episode, turn: Turn) -> list[ChatMessage]:
    return [
        ChatMessage(
            role="tool",
            name=call.name,
            tool_call_id=call.id or str(i),
            content=use_tool(episode, call.name, call.arguments),
        )
        for i, call in enumerate(turn.tool_calls)
    ]


def _seed(text: str) -> int:
    return zlib.crc32(text.encode())
