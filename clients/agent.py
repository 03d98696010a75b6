"""An ordinary agent built on the openai SDK: plays episodes of m1serve.envs against a server.

It sees what any client sees: messages and tool calls. Ids, logprobs and rewards stay behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import openai
from openai.types.chat import ChatCompletionMessage

from m1serve.envs import Episode, Task, make_task, max_turns, open_episode, use_tool
from m1serve.types import Mode

REQUEST_TIMEOUT_S = 300.0
MAX_TOKENS = 256
"""Of one answer; a model that rambles must not hold up its whole group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePlan:
    """One episode to play: which task, under which session, in which group."""

    task_id: str
    session_id: str
    group_key: str
    mode: Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    plan: EpisodePlan
    messages: tuple[dict[str, object], ...]
    """The transcript as the client saw it, reasoning included."""
    num_requests: int
    failures: tuple[str, ...]
    """One line a request that did not get its answer."""
    num_completion_tokens: int
    seconds: float


class Agent:
    """Many episodes at once over one connection pool. Nothing is retried: a failure is counted."""

    def __init__(
        self, base_url: str, *, model: str, api_key: str = "none", concurrency: int = 64
    ) -> None:
        self._client = openai.AsyncOpenAI(
            base_url=base_url, api_key=api_key, max_retries=0, timeout=REQUEST_TIMEOUT_S
        )
        self._model = model
        self._places = asyncio.Semaphore(concurrency)

    async def close(self) -> None:
        await self._client.close()

    async def play_all(
        self,
        plans: Sequence[EpisodePlan],
        *,
        on_done: Callable[[PlayedEpisode], None] = lambda _: None,
    ) -> list[PlayedEpisode]:
        """Plays every plan, at most `concurrency` at once; results in the order of the plans."""

        async def one(plan: EpisodePlan) -> PlayedEpisode:
            async with self._places:
                played = await self.play(plan)
            on_done(played)
            return played

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(plan)) for plan in plans]
        return [task.result() for task in tasks]

    async def play(self, plan: EpisodePlan) -> PlayedEpisode:
        started = time.perf_counter()
        run = _Conversation(make_task(plan.task_id), open_episode(plan.task_id))
        failures: list[str] = []
        num_requests = 0
        for _ in range(max_turns(plan.task_id)):
            num_requests += 1
            try:
                answer = await self._ask(run, plan)
            except openai.OpenAIError as error:
                failures.append(f"{type(error).__name__}: {error}")
                break
            if not run.take(answer):
                break
        try:
            await self._client.post(f"/sessions/{plan.session_id}/end", cast_to=object)
        except openai.OpenAIError as error:
            failures.append(f"end of session: {type(error).__name__}: {error}")
        return PlayedEpisode(
            plan=plan,
            messages=tuple(run.transcript),
            num_requests=num_requests,
            failures=tuple(failures),
            num_completion_tokens=run.num_completion_tokens,
            seconds=time.perf_counter() - started,
        )

    async def _ask(self, run: _Conversation, plan: EpisodePlan) -> ChatCompletionMessage:
        completion = await self._client.chat.completions.create(
            model=self._model,
            messages=run.messages,  # type: ignore[arg-type]
            tools=run.tools or openai.omit,  # type: ignore[arg-type]
            max_tokens=MAX_TOKENS,
            extra_headers={
                "X-M1-Session-Id": plan.session_id,
                "X-M1-Group-Id": plan.group_key,
                "X-M1-Task-Id": plan.task_id,
                "X-M1-Mode": plan.mode.value,
            },
        )
        if completion.usage is not None:
            run.num_completion_tokens += completion.usage.completion_tokens
        return completion.choices[0].message


class _Conversation:
    """The messages of one episode, and the world its tool calls act on."""

    def __init__(self, task: Task, episode: Episode) -> None:
        self.tools = [{"type": "function", "function": tool} for tool in task.tools]
        self.messages: list[dict[str, object]] = [
            {"role": "system", "content": task.system},
            {"role": "user", "content": task.user},
        ]
        self.transcript = list(self.messages)
        self.num_completion_tokens = 0
        self._episode = episode

    def take(self, answer: ChatCompletionMessage) -> bool:
        """Appends the answer and the results of its tool calls; False when it called none."""
        said = answer.model_dump(exclude_none=True)
        self.transcript.append(said)
        self.messages.append({k: said[k] for k in ("role", "content", "tool_calls") if k in said})
        for call in said.get("tool_calls", ()):
            function = call["function"]
            result = {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": function["name"],
                "content": use_tool(self._episode, function["name"], function["arguments"]),
            }
            self.messages.append(result)
            self.transcript.append(result)
        return bool(said.get("tool_calls"))
