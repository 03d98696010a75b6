"""Demonstrations: the scripted clerk's conversations as token ids, in the serving format."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from m1serve.chat.messages import ChatMessage
from m1serve.chat.template import encode_extension, encode_prompt
from m1serve.chat.tokenizer import EOS, ChatTokenizer
from m1serve.envs.base import FAMILIES, Problem, build_problem
from m1serve.envs.clerk import Played, play
from m1serve.envs.desk import DESK_FAMILIES, build_desk_problem, desk_of
from m1serve.envs.maths import MATHS_FAMILIES
from m1serve.envs.policy import Desk
from m1serve.envs.saying import CAREFUL, Say, Shortcuts
from m1serve.envs.task import TaskId

_NUMBERS = 10**12
_PROMPT_EVERY = 4
SMALL_TALK = (
    (
        ("Hi!", "hi", "Hello", "hello!", "Hey", "hey there", "Good morning", "Hello there!"),
        "Hello! How can I help you with your order?",
    ),
    (
        ("Thanks!", "thanks", "Thank you.", "thank you!", "Thanks a lot", "ok thanks", "Great!"),
        "You are welcome.",
    ),
    (
        ("Who are you?", "who are you", "What are you?", "Are you a robot?", "Is this the shop?"),
        "I am the shop agent. I can look up, cancel and refund orders.",
    ),
    (
        (
            "What can you do?",
            "what can you do",
            "Help",
            "help me",
            "Can you help me?",
            "I need help",
        ),
        "I can look up, cancel and refund orders, and calculate.",
    ),
    (("Bye", "bye!", "Goodbye", "See you", "That is all.", "ok"), "Goodbye!"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationMix:
    shortcuts: Shortcuts = CAREFUL
    small_talk: float = 0.06
    """Share of desk conversations that are, or begin with, small talk."""
    two_tasks: float = 0.15
    """Share of desk conversations with a second request."""
    weights: dict[str, float] = field(default_factory=dict)
    """Of the families; 1 where not named."""

    def draw_family(self, families: Sequence[str], rng: random.Random) -> str:
        return rng.choices(families, [self.weights.get(f, 1.0) for f in families])[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Two parts, so that rows with the same system prompt can share the first."""

    prefix_ids: tuple[int, ...]
    ids: tuple[int, ...]
    is_said: tuple[bool, ...]
    """As long as `ids`: tokens of the clerk."""


class _Tail:
    """Token streams after the prefix, under construction."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.is_said: list[bool] = []

    def add(self, ids: Sequence[int], *, is_said: bool) -> None:
        self.ids += ids
        self.is_said += [is_said] * len(ids)


def render_say(say: Say) -> str:
    """As the model writes a turn, without the end of the sentence."""
    text = f"<think>\n{say.thought}\n</think>\n{say.content}"
    if not say.calls:
        return text
    lines = (json.dumps({"name": c.name, "arguments": dict(c.arguments)}) for c in say.calls)
    return f"{text}<tool_calls>\n" + "".join(line + "\n" for line in lines) + "</tool_calls>"


def draw_desk(rng: random.Random) -> Desk:
    return desk_of(TaskId(family="lookup", split="train", number=rng.randrange(_NUMBERS)))


def desk_conversation(
    tok: ChatTokenizer, desk: Desk, rng: random.Random, mix: DemonstrationMix
) -> Conversation:
    """One or two requests, or small talk, at `desk`."""
    tail = _Tail()
    roll = rng.random()
    num_tasks = 2 if rng.random() < mix.two_tasks else 1
    if roll < mix.small_talk:
        _talk(tok, tail, rng)
        num_tasks = 1 if roll < mix.small_talk / 2 else 0
    for _ in range(num_tasks):
        family = mix.draw_family(DESK_FAMILIES, rng)
        task_id = TaskId(family=family, split="train", number=rng.randrange(_NUMBERS))
        problem = build_desk_problem(task_id, desk)
        _append(tok, tail, problem.task.user, play(problem, rng, mix.shortcuts))
    prefix_ids = prompt_ids(tok, desk.system, desk.tools)
    return Conversation(prefix_ids=prefix_ids, ids=tuple(tail.ids), is_said=tuple(tail.is_said))


def maths_conversation(
    tok: ChatTokenizer, rng: random.Random, mix: DemonstrationMix
) -> Conversation:
    family = mix.draw_family(MATHS_FAMILIES, rng)
    return task_conversation(tok, _draw(family, rng), rng, mix)


def task_conversation(
    tok: ChatTokenizer, problem: Problem, rng: random.Random, mix: DemonstrationMix
) -> Conversation:
    tail = _Tail()
    _append(tok, tail, problem.task.user, play(problem, rng, mix.shortcuts))
    prefix_ids = prompt_ids(tok, problem.task.system, problem.task.tools)
    return Conversation(prefix_ids=prefix_ids, ids=tuple(tail.ids), is_said=tuple(tail.is_said))


def sample_texts(
    bare: ChatTokenizer, count: int, rng: random.Random, mix: DemonstrationMix
) -> list[str]:
    """Conversations as text, to train a tokenizer on; `bare` is one that only knows bytes."""
    texts: list[str] = []
    for i in range(count):
        problem = _draw(FAMILIES[i % len(FAMILIES)], rng)
        conversation = task_conversation(bare, problem, rng, mix)
        texts.append(bare.decode(conversation.ids))
        # rarer than in use, so that merges are not all spent on them
        if i // len(FAMILIES) % _PROMPT_EVERY == 0:
            texts.append(bare.decode(conversation.prefix_ids))
    return texts


def prompt_ids(
    tok: ChatTokenizer, system: str, tools: Sequence[dict[str, object]]
) -> tuple[int, ...]:
    """The part of a conversation that others share."""
    rendered = encode_prompt(tok, [ChatMessage(role="system", content=system)], tools)
    return rendered.ids[: rendered.system_end]


def _draw(family: str, rng: random.Random) -> Problem:
    return build_problem(f"{family}/train/{rng.randrange(_NUMBERS)}")


def _append(tok: ChatTokenizer, tail: _Tail, user: str, played: Played) -> None:
    _hear(tok, tail, [ChatMessage(role="user", content=user)])
    for say, results in zip(played.said, _results(played), strict=True):
        tail.add(tok.encode_control(render_say(say) + EOS), is_said=True)
        if results:
            _hear(tok, tail, results)


def _results(played: Played) -> list[list[ChatMessage]]:
    return [
        [
            ChatMessage(role="tool", name=call.name, content=result)
            for call, result in zip(say.calls, results, strict=True)
        ]
        for say, results in zip(played.said, played.results, strict=True)
    ]


def _talk(tok: ChatTokenizer, tail: _Tail, rng: random.Random) -> None:
    asks, answer = rng.choice(SMALL_TALK)
    _hear(tok, tail, [ChatMessage(role="user", content=rng.choice(asks))])
    said = render_say(Say(thought="This is small talk.", content=answer))
    tail.add(tok.encode_control(said + EOS), is_said=True)


def _hear(tok: ChatTokenizer, tail: _Tail, messages: list[ChatMessage]) -> None:
    """The first message follows the prefix, any other the end of a turn."""
    if tail.ids:
        tail.add(encode_extension(tok, True, messages), is_said=False)
        return
    rendered = encode_prompt(tok, messages, ())
    tail.add(rendered.ids[rendered.system_end :], is_said=False)
