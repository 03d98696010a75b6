"""Which conversation a request goes on with when its client names no session. Memory only.

Never a guess: a request joins the one running conversation that has the history it was sent with.
Where several have and nothing tells them apart, the turn is ambiguous and gets a session of its
own.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from m1serve.api.lookalikes import (
    MAX_ALIKE,
    NO_TRAITS,
    Answer,
    Asker,
    Placement,
    is_changed_form,
    may_go_on,
    tell_apart,
    traits_of,
)
from m1serve.api.token_prefixes import TokenPrefixes
from m1serve.chat.chain import Chain
from m1serve.chat.messages import ChatMessage
from m1serve.store.records import SessionSource

MAX_REQUESTS = 50_000
"""About 2 KB each; the oldest are forgotten, and what goes on with them starts a session."""
_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request, as far as it tells where it belongs."""

    asker: Asker
    session_id: str | None
    """The one the client named."""
    retry_count: int
    messages: Sequence[ChatMessage] = field(repr=False)
    chain: Chain = field(repr=False)
    model: str = ""
    prompt_ids: Sequence[int] = field(default=(), repr=False)
    """Both of a text to complete; it has no messages."""


@dataclass(slots=True)
class _Session:
    last_seen: float
    is_ended: bool = False


class SessionIndex:
    """Thread-safe. `find` a request's place and `enter` it there, say `answered` for each choice,
    then `settle` it.
    """

    def __init__(
        self,
        *,
        idle_s: float,
        max_requests: int = MAX_REQUESTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._idle_s = idle_s
        self._max_requests = max_requests
        self._clock = clock
        self._lock = threading.Lock()
        self._placed: deque[Placement] = deque()
        self._by_chain: dict[bytes, list[Answer]] = {}
        self._by_prompt: dict[bytes, list[Answer]] = {}
        self._by_tokens = TokenPrefixes()
        self._by_request: dict[tuple[str, str], list[Placement]] = {}
        self._sessions: OrderedDict[tuple[str, str], _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._placed)

    def find(self, question: Question) -> Placement:
        """Where it belongs; nothing is changed, so that a request may still be refused."""
        with self._lock:
            if question.messages:
                return self._find(question, self._predecessors)
            scope = f"{question.asker.key_id}\0{question.model}"
            begun, text = self._by_tokens.read(scope, question.prompt_ids)
            placement = self._find(question, lambda asked: self._begun(asked, begun))
            placement.text = text
            return placement

    def enter(self, placement: Placement) -> None:
        """It is being answered."""
        with self._lock:
            self._touch(placement)
            if placement.parent is not None:
                placement.parent.children.append(placement)
            if placement.repeats is not None:
                placement.repeats.is_retried = True
            _add(self._by_request, _request_key(placement.asker), placement)
            self._placed.append(placement)
            while len(self._placed) > self._max_requests:
                self._forget(self._placed.popleft())

    def answered(self, placement: Placement, message: ChatMessage, chain: Chain) -> None:
        """Before the last byte is sent: the client's next request may be here at once.

        `chain` is that of the messages that were asked.
        """
        answer = Answer(
            placement=placement,
            chain_key=chain.with_answer(message),
            prompt_key=chain.keys[-1],
            traits=traits_of(message),
        )
        with self._lock:
            if placement.is_forgotten:
                return
            placement.answers.append(answer)
            _add(self._by_chain, answer.chain_key, answer)
            _add(self._by_prompt, answer.prompt_key, answer)
            self._touch(placement)

    def completed(self, placement: Placement, ids: Sequence[int]) -> None:
        """As `answered`, for a text: `ids` are what was sampled, without an end of sentence."""
        if placement.text is None or not ids:
            return
        key = placement.text.with_answer(ids)
        answer = Answer(
            placement=placement, chain_key=b"", prompt_key=b"", traits=NO_TRAITS, token_key=key
        )
        with self._lock:
            if placement.is_forgotten:
                return
            placement.answers.append(answer)
            self._by_tokens.add(key, answer)
            self._touch(placement)

    def settle(self, placement: Placement, *, was_delivered: bool) -> None:
        """A request whose answer was lost takes nobody's place."""
        with self._lock:
            placement.is_settled, placement.is_lost = True, not was_delivered
            self._touch(placement)

    def end(self, tenant_id: str, session_id: str) -> None:
        """The client said so: only what can be nothing else goes on with it."""
        with self._lock:
            session = self._sessions.get((tenant_id, session_id))
            if session is not None:
                session.is_ended = True

    def _find(
        self, question: Question, predecessors: Callable[[Question], list[Answer]]
    ) -> Placement:
        asker, new_id = question.asker, f"sess-{uuid.uuid4().hex}"
        if question.session_id is not None:
            return Placement(
                asker=asker, session_id=question.session_id, source=SessionSource.NAMED
            )
        repeated = self._repeated(asker) if question.retry_count else None
        if repeated is not None:
            return Placement(
                asker=asker,
                session_id=repeated.session_id,
                source=SessionSource.RETRY,
                parent=repeated.parent,
                repeats=repeated,
            )
        found = predecessors(question)
        sessions = {answer.placement.session_id for answer in found}
        if len(sessions) == 1:
            return Placement(
                asker=asker,
                session_id=sessions.pop(),
                source=SessionSource.INFERRED,
                parent=found[-1],
            )
        source = SessionSource.AMBIGUOUS if sessions else SessionSource.NEW
        return Placement(asker=asker, session_id=new_id, source=source)

    def _repeated(self, asker: Asker) -> Placement | None:
        """The attempt that a declared retry repeats: one that failed before one that still runs,
        and that before one that was answered. None when several sessions have such a one.

        An answer that somebody went on with arrived: nobody asks for it again.
        """
        asked = self._by_request.get(_request_key(asker), ())
        attempts = [
            placed
            for placed in asked
            if not placed.is_retried and not any(answer.children for answer in placed.answers)
        ]
        for kind in ((True, True), (False, False), (True, False)):
            of_kind = [p for p in attempts if (p.is_settled, p.is_lost) == kind]
            if of_kind:
                return of_kind[-1] if len({p.session_id for p in of_kind}) == 1 else None
        return None

    def _predecessors(self, question: Question) -> list[Answer]:
        """Answers that the newest known assistant message can be, after all that tells apart."""
        keys, asker = question.chain.keys, question.asker
        places = [i for i, m in enumerate(question.messages) if m.role == "assistant"]
        for place in reversed(places):
            known = self._by_chain.get(keys[place], ())
            asked = self._by_prompt.get(keys[place - 1], ()) if place else ()
            if not known and not asked:
                continue
            replayed = traits_of(question.messages[place])
            # clients drop calls and trim text: then one answer comes back looking like another
            found = [
                answer
                for answer in dict.fromkeys((*asked, *known))
                if may_go_on(asker, answer)
                and (answer.chain_key == keys[place] or is_changed_form(answer.traits, replayed))
            ]
            if found:
                is_last = place == places[-1]
                return tell_apart(found, replayed, asker, is_last=is_last, is_open=self._is_open)
        return []

    def _begun(self, question: Question, begun: list[Answer]) -> list[Answer]:
        asker = question.asker
        found = [answer for answer in begun if may_go_on(asker, answer)]
        return tell_apart(found, NO_TRAITS, asker, is_last=True, is_open=self._is_open)

    def _is_open(self, answer: Answer) -> bool:
        session = self._sessions.get(_session_key(answer.placement))
        return (
            session is not None
            and not session.is_ended
            and self._clock() - session.last_seen <= self._idle_s
        )

    def _touch(self, placement: Placement) -> None:
        key, now = _session_key(placement), self._clock()
        self._sessions.setdefault(key, _Session(now)).last_seen = now
        self._sessions.move_to_end(key)
        while len(self._sessions) > self._max_requests:
            self._sessions.popitem(last=False)

    def _forget(self, placement: Placement) -> None:
        placement.is_forgotten = True
        _drop(self._by_request, _request_key(placement.asker), placement)
        for answer in placement.answers:
            if answer.token_key is not None:
                self._by_tokens.drop(answer.token_key, answer)
                continue
            _drop(self._by_chain, answer.chain_key, answer)
            _drop(self._by_prompt, answer.prompt_key, answer)
        if placement.parent is not None:
            placement.parent.children.remove(placement)
            placement.parent = None
        placement.repeats = None


def _request_key(asker: Asker) -> tuple[str, str]:
    return asker.key_id, asker.request_hash


def _session_key(placement: Placement) -> tuple[str, str]:
    return placement.asker.tenant_id, placement.session_id


def _add(table: dict[_Key, list[_Value]], key: _Key, value: _Value) -> None:
    values = table.setdefault(key, [])
    values.append(value)
    if len(values) > MAX_ALIKE:
        del values[0]


def _drop(table: dict[_Key, list[_Value]], key: _Key, value: _Value) -> None:
    rest = [other for other in table.get(key, ()) if other is not value]
    if rest:
        table[key] = rest
    else:
        table.pop(key, None)
