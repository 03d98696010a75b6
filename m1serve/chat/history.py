"""`history: exact`: the ids behind messages we returned, so sampled tokens stay as they were.

A conversation is known by the canonical hash of its messages up to an answer of ours. Two rollouts
may look alike and differ in their thinking: call ids, the replayed reasoning and the session tell
them apart. Where they cannot, text is rendered: no prompt holds a thought that may be another's.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from m1serve.chat.chain import Chain, chain_of
from m1serve.chat.messages import ChatMessage
from m1serve.chat.template import RenderedPrompt, encode_extension, encode_prompt
from m1serve.chat.tokenizer import ChatTokenizer

_OVERHEAD_BYTES = 512
"""Python objects of one remembered turn, roughly."""
_MAX_LOOKALIKES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryMatch:
    prompt: RenderedPrompt
    parent_session_id: str | None
    """Of the turn this prompt extends; None when everything was rendered."""
    num_exact_ids: int
    """Leading ids taken over as they were."""
    packed_ids: array[int] | None = field(default=None, repr=False)
    """The prompt's ids once more, as `remember` keeps them; None when it will not be asked to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remembered:
    ids: array[int] = field(repr=False)
    system_end: int
    session_id: str
    call_ids: tuple[str, ...]
    reasoning: bytes
    num_bytes: int


class HistoryIndex:
    """Least recently used turns go first; a forgotten turn only means rendering from text."""

    def __init__(self, tokenizer: ChatTokenizer, *, max_bytes: int = 256 * 2**20) -> None:
        self._tok = tokenizer
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._turns: OrderedDict[bytes, list[_Remembered]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._turns.values()))

    def remember(
        self,
        tenant: str,
        alias: str,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, object]],
        ids: Sequence[int],
        *,
        system_end: int = 0,
        session_id: str = "",
        chain: Chain | None = None,
    ) -> None:
        """`messages` end with the answer as returned; `ids` are its prompt and what was sampled: an
        array is kept as it is, so that the event loop copies nothing. `chain` is that of the
        messages before the answer, where somebody has it.
        """
        chain = chain or chain_of(tenant, alias, messages[:-1], tools)
        key = chain.with_answer(messages[-1])
        answer = messages[-1]
        packed = ids if isinstance(ids, array) else array("i", ids)
        turn = _Remembered(
            ids=packed,
            system_end=system_end,
            session_id=session_id,
            call_ids=tuple(call.id for call in answer.tool_calls),
            reasoning=_digest(answer.reasoning),
            num_bytes=len(packed) * packed.itemsize + _OVERHEAD_BYTES,
        )
        with self._lock:
            alike = self._turns.setdefault(key, [])
            alike.append(turn)
            self._num_bytes += turn.num_bytes
            if len(alike) > _MAX_LOOKALIKES:
                self._num_bytes -= alike.pop(0).num_bytes
            self._turns.move_to_end(key)
            while self._num_bytes > self._max_bytes and self._turns:
                _, dropped = self._turns.popitem(last=False)
                self._num_bytes -= sum(old.num_bytes for old in dropped)

    def prompt(
        self,
        tenant: str,
        alias: str,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, object]],
    ) -> tuple[RenderedPrompt, bool]:
        """The prompt of `messages`, and whether it extends the ids of a turn we sampled."""
        match = self.match(tenant, alias, messages, tools)
        return match.prompt, match.parent_session_id is not None

    def match(
        self,
        tenant: str,
        alias: str,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, object]],
        *,
        session_id: str | None = None,
        chain: Chain | None = None,
    ) -> HistoryMatch:
        """As `prompt`; `session_id` is the one the turn belongs to, where that is known."""
        chain = chain or chain_of(tenant, alias, messages, tools)
        answered = [
            (place, key)
            for place, key in enumerate(chain.keys)
            if messages[place].role == "assistant"
        ]
        for place, key in reversed(answered):
            rest = messages[place + 1 :]
            if any(message.role == "system" for message in rest):
                # the template hoists it to the front: nothing after it can be an extension
                break
            turn = self._find(key, messages[place], session_id)
            if turn is not None:
                return self._extended(turn, rest)
        prompt = encode_prompt(self._tok, messages, tools)
        packed = array("i", prompt.ids)
        return HistoryMatch(
            prompt=prompt, parent_session_id=None, num_exact_ids=0, packed_ids=packed
        )

    def _extended(self, turn: _Remembered, rest: Sequence[ChatMessage]) -> HistoryMatch:
        tail = encode_extension(self._tok, turn.ids[-1] == self._tok.eos_id, rest)
        # a million ids: each of these is one pass in C
        ids = (*turn.ids.tolist(), *tail)
        return HistoryMatch(
            prompt=RenderedPrompt(ids=ids, system_end=turn.system_end),
            parent_session_id=turn.session_id,
            num_exact_ids=len(turn.ids),
            packed_ids=turn.ids + array("i", tail),
        )

    def _find(self, key: bytes, answer: ChatMessage, session_id: str | None) -> _Remembered | None:
        with self._lock:
            alike = list(reversed(self._turns.get(key, ())))
            if alike:
                self._turns.move_to_end(key)
        return _the_one(alike, answer, session_id)


def _the_one(
    alike: Sequence[_Remembered], answer: ChatMessage, session_id: str | None
) -> _Remembered | None:
    """Of equal turns, newest first, the one that `answer` can only be; None when several can."""
    call_ids = tuple(call.id for call in answer.tool_calls if call.id)
    called = [turn for turn in alike if call_ids and turn.call_ids == call_ids]
    if not called and answer.reasoning:
        # a thought that is none of theirs was not ours
        reasoning = _digest(answer.reasoning)
        alike = [turn for turn in alike if turn.reasoning == reasoning]
    left = called or alike
    # one session's choices that read the same: the newest
    own = [turn for turn in left if session_id is not None and turn.session_id == session_id]
    if own:
        return own[0]
    is_clear = all(turn.ids == left[0].ids for turn in left)
    return left[0] if left and is_clear else None


def _digest(text: str | None) -> bytes:
    """Clients trim what they replay."""
    told = (text or "").strip()
    return hashlib.blake2b(told.encode("utf-8", "replace"), digest_size=8).digest()
