"""Clients that remember what they were answered, and what kills the processes under them."""

from __future__ import annotations

import asyncio
import os
import queue
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

FAILURES = (openai.APIError, httpx.HTTPError)
AIMS = {"train": 0.3, "write": 0.03, "commit": 0.0, "gate": 0.5, "promote": 0.0}
"""Phases of a run that its trainer is killed in, and how many seconds into them at most."""
JUST_BEFORE = {"write": "train", "commit": "write", "promote": "gate"}
LAST_FENCE = 4
"""A run is given up after five trainers, so the fifth is left alone."""
AT_WORK = {
    # the lease of a scoring was taken a moment ago
    "worker": "SELECT count(*) FROM jobs WHERE lease_until - 14.5 > ?",
    "sidecar": "SELECT max(ingested_at) > ? - 0.1 FROM turns",
}


@dataclass(frozen=True)
class Received:
    """A turn whose answer arrived whole."""

    turn_id: str
    session_id: str
    token_ids: tuple[int, ...]
    content: str


@dataclass
class Players:
    """Clients that play groups of short conversations until told to stop, whatever breaks."""

    product: Any
    seed: int
    received: list[Received] = field(default_factory=list)
    feedback_ids: set[str] = field(default_factory=set)
    """Of feedback that was acknowledged."""
    ended_sessions: set[str] = field(default_factory=set)
    """Those whose end was acknowledged."""
    on_answer: Callable[[], object] | None = None
    """Called once, as soon as the next answer has arrived whole."""
    num_failures: int = 0
    num_groups: int = 0
    is_over: bool = False

    async def play(self, *, concurrency: int, num_groups: int | None = None) -> None:
        """Until `is_over`, or until so many groups more were begun."""
        last = None if num_groups is None else self.num_groups + num_groups

        async def play_groups() -> None:
            while not self.is_over and self.num_groups != last:
                self.num_groups += 1
                await self._play_group(client, self.num_groups)

        async with openai.AsyncOpenAI(
            base_url=f"{self.product.url}/v1", api_key="none", max_retries=0, timeout=30
        ) as client:
            await asyncio.gather(*(play_groups() for _ in range(concurrency)))

    async def _play_group(self, client: openai.AsyncOpenAI, number: int) -> None:
        draw = random.Random(f"{self.seed}/{number}")
        kind = draw.choice(["chat", "chat", "choices", "task", "eval"])
        name = f"{kind}-{self.seed}-{number}"
        if draw.random() < 0.4:
            # the SDK repeats a failed request by itself
            client = client.with_options(max_retries=4)
        labels = {"X-M1-Group-Id": name, "X-M1-Mode": "eval" if kind == "eval" else "train"}
        if kind in ("task", "eval"):
            labels["X-M1-Task-Id"] = f"sums/train/{number}"
        places = range(1 if kind == "choices" else 4)
        plays = [self._play_session(client, kind, f"{name}-{p}", p, labels) for p in places]
        await asyncio.gather(*plays)

    async def _play_session(
        self,
        client: openai.AsyncOpenAI,
        kind: str,
        session_id: str,
        place: int,
        labels: dict[str, str],
    ) -> None:
        draw = random.Random(session_id)
        labels = {**labels, "X-M1-Session-Id": session_id}
        messages: list[Any] = [{"role": "user", "content": f"say something about {session_id}"}]
        for _ in range(draw.randint(1, 2)):
            turns = await self._ask(client, messages, labels, draw.random() < 0.4, kind)
            if not turns and draw.random() < 0.5:
                # walks away from a server that died under it
                return
            if not turns:
                turns = await self._ask(client, messages, labels, False, kind)
            if not turns:
                return
            messages.append({"role": "assistant", "content": turns[0].content})
            messages.append({"role": "user", "content": "and now?"})
            if kind == "choices":
                for value, turn in enumerate(turns):
                    await self._feedback(client, turn_id=turn.turn_id, value=value % 2)
                break
        if kind == "chat":
            await self._feedback(client, session_id=session_id, value=place % 2)
        if await self._post(client, f"/sessions/{session_id}/end", {}) is not None:
            self.ended_sessions.add(session_id)

    async def _ask(
        self,
        client: openai.AsyncOpenAI,
        messages: list[Any],
        labels: dict[str, str],
        is_stream: bool,
        kind: str,
    ) -> list[Received]:
        """The choices, empty when no whole answer came."""
        num = 3 if kind == "choices" else 1
        try:
            raw = await client.chat.completions.with_raw_response.create(
                model="nano",
                messages=messages,
                n=num,
                stream=is_stream,
                extra_headers=labels,
                extra_body={"return_token_ids": True},
            )
            said = await (_read_stream(raw.parse(), num) if is_stream else _read_body(raw.parse()))
        except FAILURES:
            self.num_failures += 1
            await asyncio.sleep(0.5)
            return []
        turn_ids = raw.headers["x-m1-turn-id"].split(",")
        session_id = labels["X-M1-Session-Id"]
        turns = [
            Received(turn_id, session_id, tuple(ids), content)
            for turn_id, (ids, content) in zip(turn_ids, said, strict=True)
        ]
        self.received += turns
        if (hook := self.on_answer) is not None:
            self.on_answer = None
            hook()
        return turns

    async def _feedback(self, client: openai.AsyncOpenAI, **body: object) -> None:
        answer = await self._post(client, "/feedback", body)
        if answer is not None:
            self.feedback_ids.add(answer["id"])

    async def _post(
        self, client: openai.AsyncOpenAI, path: str, body: dict[str, object]
    ) -> dict[str, Any] | None:
        for _ in range(40):
            try:
                answer: Any = await client.post(path, body=body, cast_to=object)
            except FAILURES:
                self.num_failures += 1
                await asyncio.sleep(0.5)
            else:
                return dict(answer)
        return None


async def _read_body(completion: Any) -> list[tuple[list[int], str]]:
    return [(c.token_ids, c.message.content or "") for c in completion.choices]


async def _read_stream(stream: Any, num: int) -> list[tuple[list[int], str]]:
    ids: list[list[int]] = [[] for _ in range(num)]
    text = [""] * num
    async for chunk in stream:
        for choice in chunk.choices:
            ids[choice.index] += choice.token_ids
            text[choice.index] += choice.delta.content or ""
    return list(zip(ids, text, strict=True))


class Killer:
    """Keeps a list of what it hit: role, and the phase in which that left the run."""

    def __init__(self, product: Any, players: Any) -> None:
        self.product, self.players = product, players
        self.killed: list[tuple[str, str]] = []

    def strike(self, role: str) -> Any:
        process = self.product.role(role)
        if process is not None:
            os.kill(process.pid, signal.SIGKILL)
        return process

    def see_it_restart(self, role: str, process: Any) -> None:
        self.product.wait_until(lambda: not process.is_alive, 10, f"{role} dies")
        live = self.live_run()
        self.killed.append((role, live[0] if live is not None else ""))
        self.product.wait_until(
            lambda: self.product.role(role) not in (None, process), 60, f"{role} restarted"
        )

    def kill_at_random(self, role: str, num: int) -> None:
        """While it starts, or in the middle of its work."""
        draw = random.Random(f"{self.players.seed}/{role}")
        for _ in range(num):
            time.sleep(draw.uniform(0.1, 3.0))
            if draw.random() < 0.7:
                sql = AT_WORK[role]
                self.product.wait_until(lambda sql=sql: self.product.one(sql, time.time()), 60, sql)
            self.see_it_restart(role, self.strike(role))

    def kill_servers(self, num: int) -> None:
        """The moment an answer has arrived, while it starts, and at any other moment."""
        draw = random.Random(f"{self.players.seed}/server")
        for place in range(num):
            if place != 3:
                self.product.wait_until(self.product.is_serving, 60, "serving again")
            time.sleep(draw.uniform(0.1, 2.0))
            if place % 2 == 0:
                struck: queue.Queue[Any] = queue.Queue()
                self.players.on_answer = lambda struck=struck: struck.put(self.strike("server"))
                self.see_it_restart("server", struck.get(timeout=60))
            else:
                self.see_it_restart("server", self.strike("server"))

    def kill_trainers_at_work(self) -> None:
        draw = random.Random(f"{self.players.seed}/trainer")
        for aim, within_s in AIMS.items():
            self.await_phase(aim)
            time.sleep(draw.uniform(0.0, within_s))
            self.see_it_restart("trainer", self.strike("trainer"))

    def await_phase(self, aim: str) -> None:
        """Looks more often when a short one comes next."""
        deadline = time.monotonic() + 120
        while not self.is_at(aim):
            assert time.monotonic() < deadline, f"no run was seen in {aim}"
            time.sleep(0.001 if self.is_at(JUST_BEFORE.get(aim, "")) else 0.02)

    def live_run(self) -> Any:
        """(phase, owner, fence)"""
        sql = "SELECT phase, owner, fence FROM runs WHERE state IN ('running', 'committed')"
        return next(iter(self.product.rows(sql)), None)

    def is_at(self, phase: str) -> bool:
        """The trainer that lives is in this phase."""
        live, trainer = self.live_run(), self.product.role("trainer")
        if live is None or trainer is None:
            return False
        is_its = live[1].endswith(f":{trainer.pid}") and live[2] <= LAST_FENCE
        return bool(is_its and live[0] == phase)


@pytest.fixture
def make_players() -> type[Players]:
    return Players


@pytest.fixture
def make_killer() -> type[Killer]:
    return Killer
