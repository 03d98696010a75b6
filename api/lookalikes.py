"""Answers that a replayed assistant message could be, and what tells them apart. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from m1serve.chat.chain import canonical_call
from m1serve.chat.messages import ChatMessage
from m1serve.store.records import SessionSource

if TYPE_CHECKING:
    from m1serve.api.token_prefixes import ReadPrompt

MAX_ALIKE = 1024
"""Of equal conversations only the newest are looked through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What is kept of an assistant message: enough to recognise it, none of its text."""

    call_ids: tuple[str, ...]
    reasoning: bytes | None
    content: bytes | None
    """Of what is left without surrounding space; None when nothing is."""
    first_call: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Who sent a request, and what they called it."""

    tenant_id: str
    key_id: str
    request_hash: str
    hints: Mapping[str, str]
    """User, task and group, as far as the client named them."""


@dataclass(slots=True, eq=False, kw_only=True)
class Placement:
    """A request in its session, from its arrival until it is forgotten."""

    asker: Asker
    session_id: str
    source: SessionSource
    parent: Answer | None = None
    """The answer it goes on with."""
    answers: list[Answer] = field(default_factory=list)
    is_settled: bool = False
    is_lost: bool = False
    """Settled, and its answer never reached the client."""
    text: ReadPrompt | None = None
    """The prompt, when it is a text to complete."""
    repeats: Placement | None = None
    """The attempt that this declared retry repeats."""
    is_retried: bool = False
    is_forgotten: bool = False
    """Answers that come now are not kept."""


@dataclass(slots=True, eq=False, kw_only=True)
class Answer:
    """One choice that was answered."""

    placement: Placement
    chain_key: bytes
    """Of the conversation that ends with it."""
    prompt_key: bytes
    """Of the conversation it answers."""
    traits: Traits
    token_key: tuple[str, int, bytes] | None = None
    """Of the ids that it ends, when it completed a text."""
    children: list[Placement] = field(default_factory=list)
    """Requests that went on with it."""


NO_TRAITS = Traits(call_ids=(), reasoning=None, content=None, first_call=None)


def traits_of(message: ChatMessage) -> Traits:
    calls = message.tool_calls
    return Traits(
        call_ids=tuple(call.id for call in calls if call.id),
        reasoning=_digest((message.reasoning or "").strip().encode("utf-8", "replace")),
        content=_digest(message.content.strip().encode("utf-8", "replace")),
        first_call=_digest(canonical_call(calls[0])) if calls else None,
    )


def is_changed_form(one: Traits, other: Traits) -> bool:
    """Answers to one prompt that differ in text, with a sign that they are the same answer."""
    return bool(
        set(one.call_ids) & set(other.call_ids)
        or (one.reasoning is not None and one.reasoning == other.reasoning)
        or (one.content is not None and one.content == other.content)
        or (one.first_call is not None and one.first_call == other.first_call)
    )


def may_go_on(asker: Asker, answer: Answer) -> bool:
    """Of the same key, and no user, task or group speaks against it."""
    other = answer.placement.asker
    return asker.key_id == other.key_id and all(
        other.hints.get(name, value) == value for name, value in asker.hints.items()
    )


def tell_apart(
    answers: Sequence[Answer],
    replayed: Traits,
    asker: Asker,
    *,
    is_last: bool,
    is_open: Callable[[Answer], bool],
) -> list[Answer]:
    """Those that are left when each sign in turn has sorted out what does not bear it; a sign that
    nobody bears says nothing.

    A conversation goes on once: with `is_last`, an answer that others went on with already gives
    way to one that nobody did.
    """
    signs: list[Callable[[Answer], bool]] = []
    if replayed.call_ids:
        signs.append(lambda a: a.traits.call_ids == replayed.call_ids)
        signs.append(lambda a: bool(set(a.traits.call_ids) & set(replayed.call_ids)))
    if replayed.reasoning is not None:
        signs.append(lambda a: a.traits.reasoning == replayed.reasoning)
    for name, value in asker.hints.items():
        signs.append(lambda a, name=name, value=value: a.placement.asker.hints.get(name) == value)  # type: ignore[misc]
    signs.append(is_open)
    if is_last:
        signs.append(lambda a: not _is_taken(a, asker))
    left = list(answers)
    for sign in signs:
        left = [answer for answer in left if sign(answer)] or left
    return left


def _is_taken(answer: Answer, asker: Asker) -> bool:
    """Another request went on with it. One that was lost did not, and of one that still runs and
    asks the same nobody knows: this may be its retry.
    """
    return any(
        not child.is_lost and (child.is_settled or child.asker.request_hash != asker.request_hash)
        for child in answer.children
    )


def _digest(text: bytes) -> bytes | None:
    return hashlib.blake2b(text, digest_size=8).digest() if text else None
