"""Stock harnesses name no session: 32 episodes at once, told apart by what they replay alone.

The shape is TAU-bench's: agent and user simulator through one endpoint, one system prompt, the same
tools and the same first user message in every episode, histories as litellm sends them back.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from m1serve.store.records import SessionSource, TurnRecord

NUM_EPISODES = 32
GREETING = "Hi! How can I help you today?"
FIRST = "Hi! I need help with an order of mine."
WIKI = "You are a retail agent. " * 20
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("find_user", "cancel_order", "think")
]
STOP = "###STOP###"


@dataclass
class Model:
    """Samples thinking that is never the same, and answers of which there are `num_phrases`."""

    num_phrases: int
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def __call__(self, request: Any) -> str:
        rng = self.rng
        think = f"<think>\n{rng.getrandbits(64):x}\n</think>\n"
        phrase = rng.randrange(self.num_phrases)
        if rng.random() < 0.4:
            call = f'{{"name": "find_user", "arguments": {{"q":{phrase}}}}}'
            # a second call, which TAU-bench leaves out of the history
            more = "\n" + call if rng.random() < 0.3 else ""
            return f"{think}<tool_calls>\n{call}{more}\n</tool_calls>"
        return f"{think}Sentence {phrase}." + (STOP if rng.random() < 0.1 else "")


@dataclass
class Harness:
    """What happened, as the harness itself logged it: turn id -> whose turn it was."""

    http: httpx.AsyncClient
    url: str
    has_reasoning: bool
    has_ids: bool
    log: dict[str, tuple[int, str]] = field(default_factory=dict)

    async def ask(self, episode: int, role: str, messages: list[Any], **more: Any) -> Any:
        """A LiteLLM-like call; returns the message as it goes back into the history."""
        model = "fake" if role == "agent" else "m1/alias"
        body = {"model": model, "messages": messages, **more}
        # episodes drift apart in time and interleave at random
        await asyncio.sleep(random.random() * 0.003)
        answer = await self.http.post(f"{self.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        self.log[answer.headers["x-m1-turn-id"]] = (episode, role)
        message = answer.json()["choices"][0]["message"]
        del message["refusal"]
        if not self.has_reasoning:
            message.pop("reasoning_content", None)
        if "tool_calls" in message:
            message["tool_calls"] = message["tool_calls"][:1]
            message.pop("content")
            if not self.has_ids:
                del message["tool_calls"][0]["id"]
        return message

    async def play(self, episode: int, num_steps: int = 8) -> None:
        user: list[Any] = [
            {"role": "system", "content": f"You are customer {episode}. Say {STOP} when done."},
            {"role": "user", "content": GREETING},
        ]
        user.append(await self.ask(episode, "user", user))
        agent: list[Any] = [
            {"role": "system", "content": WIKI},
            {"role": "user", "content": FIRST},
        ]
        for _ in range(num_steps):
            agent.append(await self.ask(episode, "agent", agent, tools=TOOLS))
            if "tool_calls" in agent[-1]:
                call = agent[-1]["tool_calls"][0]
                result = {"role": "tool", "name": "find_user", "content": "ok"}
                agent.append({**result, **({"tool_call_id": call["id"]} if "id" in call else {})})
                continue
            user.append({"role": "user", "content": agent[-1]["content"]})
            user.append(await self.ask(episode, "user", user))
            if STOP in (user[-1].get("content") or ""):
                return
            agent.append({"role": "user", "content": user[-1].get("content") or "go on"})


@dataclass
class Verdict:
    share_right: float
    num_mixed: int
    """Turns in sessions that hold turns of several conversations."""
    num_ambiguous: int
    num_turns: int


def judge(log: dict[str, tuple[int, str]], turns: list[TurnRecord]) -> Verdict:
    """A turn is right in the session that holds most of its conversation and nothing else."""
    of_session: dict[str, Counter[tuple[int, str]]] = defaultdict(Counter)
    of_owner: dict[tuple[int, str], Counter[str]] = defaultdict(Counter)
    ambiguous = {t.session_id for t in turns if t.session_source is SessionSource.AMBIGUOUS}
    for turn in turns:
        owner = log[turn.turn_id]
        of_session[turn.session_id][owner] += 1
        if turn.session_id not in ambiguous:
            of_owner[owner][turn.session_id] += 1
    mixed = {name for name, owners in of_session.items() if len(owners) > 1}
    right = sum(
        max((n for name, n in sessions.items() if name not in mixed), default=0)
        for sessions in of_owner.values()
    )
    return Verdict(
        share_right=right / len(turns),
        num_mixed=sum(of_session[name].total() for name in mixed),
        num_ambiguous=sum(t.session_id in ambiguous for t in turns),
        num_turns=len(turns),
    )


async def run(world: Any, *, num_phrases: int, has_reasoning: bool, has_ids: bool) -> Verdict:
    world.engine.say = Model(num_phrases)
    world.engine.step = 64
    async with httpx.AsyncClient(verify=False, timeout=60) as http:
        harness = Harness(http, world.url, has_reasoning, has_ids)
        await asyncio.gather(*(harness.play(episode) for episode in range(NUM_EPISODES)))
    assert set(harness.log) == {turn.turn_id for turn in world.turns}
    return judge(harness.log, world.turns)


@pytest.mark.parametrize("history", ["exact", "template"])
@pytest.mark.parametrize(
    ("num_phrases", "has_reasoning", "has_ids"),
    [
        pytest.param(3, True, False, id="litellm replays reasoning; no call ids, three phrases"),
        pytest.param(3, True, True, id="litellm as it is, three phrases"),
        pytest.param(10**6, False, False, id="nothing but text that is never the same"),
    ],
)
async def test_at_least_99_percent_of_turns_are_in_their_episode(
    serve: Any, history: str, num_phrases: int, has_reasoning: bool, has_ids: bool
) -> None:
    async with serve(model={"model_id": "fake", "history": history, "aliases": ["m1/alias"]}) as w:
        verdict = await run(
            w, num_phrases=num_phrases, has_reasoning=has_reasoning, has_ids=has_ids
        )
    assert verdict.num_turns > 200
    assert verdict.num_mixed == 0
    assert verdict.share_right >= 0.99, verdict


@pytest.mark.parametrize("history", ["exact", "template"])
async def test_what_nothing_tells_apart_is_quarantined_and_never_mixed(
    serve: Any, history: str
) -> None:
    async with serve(model={"model_id": "fake", "history": history, "aliases": ["m1/alias"]}) as w:
        verdict = await run(w, num_phrases=3, has_reasoning=False, has_ids=False)
    assert verdict.num_mixed == 0, verdict
    assert verdict.num_ambiguous > 0
