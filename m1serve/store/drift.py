"""How a turn's prompt continues its session: pure decisions over token prefixes.

A prompt that starts with an earlier turn's prompt and completion, token for token, extends it;
everything else is named for what the client did to the history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from m1serve.store.prompts import prefix_digests
from m1serve.types import Drift, HistoryRule, Mode, StopCause

CONTINUING = frozenset({Drift.EXTEND, Drift.REWRITE_LAST, Drift.EDIT})
"""Drifts that carry on their parent's trajectory; the others begin one."""
_SIDE_BELOW_TOKENS = 16
"""A shared prefix shorter than this, and than half of both prompts, is template boilerplate."""
_EDIT_CANDIDATES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    """A turn without its tokens: what linking and assembling need to know."""

    turn_id: str
    request_id: str
    request_hash: str
    retry_count: int
    created_at: float
    choice: int
    num_choices: int
    model_id: str
    key_id: str
    group_key: str | None
    task_id: str | None
    mode: Mode
    consent: bool
    history_rule: HistoryRule
    stop: StopCause
    was_delivered: bool
    num_prompt: int
    num_completion: int
    num_trainable: int
    prompt_digest: bytes
    full_digest: bytes
    min_version: int | None
    max_version: int | None
    parent_turn_id: str | None = None
    drift: Drift = Drift.ROOT
    shared_tokens: int = 0
    superseded_by: str | None = None

    @property
    def num_full(self) -> int:
        return self.num_prompt + self.num_completion

    @property
    def order(self) -> tuple[float, str, int]:
        return self.created_at, self.request_id, self.choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    parent_turn_id: str | None
    drift: Drift
    shared_tokens: int


def link_turn(
    turn: TurnFacts,
    prompt: bytes,
    earlier: Sequence[TurnFacts],
    *,
    secret: bytes,
    prompt_of: Callable[[str], bytes],
) -> Link:
    """`earlier` is linked already, in order; prompts are little-endian int32.

    A client may use one session for many tasks: a turn never carries on another task's.
    """
    others = [t for t in earlier if t.request_id != turn.request_id and _may_go_on(t, turn)]
    if not others:
        return Link(parent_turn_id=None, drift=Drift.ROOT, shared_tokens=0)
    lengths = {n for t in others for n in (t.num_prompt, t.num_full) if n <= turn.num_prompt}
    digests = prefix_digests(secret, prompt, sorted(lengths))
    extended = [
        t for t in others if t.num_completion > 0 and digests.get(t.num_full) == t.full_digest
    ]
    if extended:
        parent = max(extended, key=lambda t: (t.num_full, t.created_at, -t.choice))
        return _child(turn, parent, others, Drift.EXTEND, parent.num_full)
    prefixes = [t for t in others if digests.get(t.num_prompt) == t.prompt_digest]
    resent = [t for t in prefixes if t.num_prompt == turn.num_prompt]
    if resent:
        is_repeat = all(is_retry(t, turn) for t in resent)
        return Link(
            parent_turn_id=resent[0].parent_turn_id,
            drift=resent[0].drift if is_repeat else Drift.FORK,
            shared_tokens=resent[0].shared_tokens,
        )
    if prefixes:
        parent = max(prefixes, key=lambda t: (t.num_prompt, t.created_at, -t.choice))
        return _child(turn, parent, others, Drift.REWRITE_LAST, parent.num_prompt)
    return _edit(turn, prompt, others, prompt_of)


def is_retry(one: TurnFacts, other: TurnFacts) -> bool:
    """Equal requests of which the client saw one. Both delivered and neither a declared retry:
    asked twice.
    """
    if one.request_hash != other.request_hash or not _is_same_prompt(one, other):
        return False
    is_both_seen = one.was_delivered and other.was_delivered
    return not is_both_seen or one.retry_count != other.retry_count


def find_superseded(turns: Sequence[TurnFacts]) -> dict[str, str]:
    """Request id -> request id of the retry that the client saw instead. `turns` in order, linked.

    An answer that a later prompt builds on was seen, whatever delivery said.
    """
    parents = {t.parent_turn_id for t in turns}
    used = {t.request_id for t in turns if t.turn_id in parents}
    delivered = {t.request_id for t in turns if t.was_delivered}
    sets: dict[tuple[str, bytes, int, str | None], dict[str, TurnFacts]] = {}
    for turn in turns:
        key = (turn.request_hash, turn.prompt_digest, turn.num_prompt, turn.task_id)
        sets.setdefault(key, {}).setdefault(turn.request_id, turn)
    superseded: dict[str, str] = {}
    for requests in sets.values():
        asked = list(requests.values())
        for index, turn in enumerate(asked):
            if turn.request_id in used:
                continue
            is_seen = turn.request_id in delivered
            for other_index, other in enumerate(asked):
                is_later = other_index > index
                if is_seen:
                    is_replaced = is_later and other.retry_count > turn.retry_count
                else:
                    is_replaced = is_later or other.request_id in delivered | used
                if is_replaced and other is not turn:
                    superseded[turn.request_id] = other.request_id
    return superseded


def _may_go_on(one: TurnFacts, other: TurnFacts) -> bool:
    is_same_task = None in (one.task_id, other.task_id) or one.task_id == other.task_id
    return one.model_id == other.model_id and is_same_task


def _child(
    turn: TurnFacts, parent: TurnFacts, others: Sequence[TurnFacts], drift: Drift, shared: int
) -> Link:
    is_taken = any(
        t.parent_turn_id == parent.turn_id and not is_retry(t, turn)
        for t in others
        if t.turn_id != parent.turn_id
    )
    return Link(
        parent_turn_id=parent.turn_id,
        drift=Drift.FORK if is_taken else drift,
        shared_tokens=shared,
    )


def _edit(
    turn: TurnFacts,
    prompt: bytes,
    others: Sequence[TurnFacts],
    prompt_of: Callable[[str], bytes],
) -> Link:
    best, best_shared = others[-1], -1
    for other in reversed(others[-_EDIT_CANDIDATES:]):
        shared = _common_tokens(prompt, prompt_of(other.turn_id))
        if shared > best_shared:
            best, best_shared = other, shared
    half = min(turn.num_prompt, best.num_prompt) / 2
    if best_shared < _SIDE_BELOW_TOKENS and best_shared < half:
        return Link(parent_turn_id=None, drift=Drift.SIDE, shared_tokens=best_shared)
    return _child(turn, best, others, Drift.EDIT, best_shared)


def _is_same_prompt(one: TurnFacts, other: TurnFacts) -> bool:
    return one.num_prompt == other.num_prompt and one.prompt_digest == other.prompt_digest


def _common_tokens(one: bytes, other: bytes) -> int:
    low, high = 0, min(len(one), len(other)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if one[4 * low : 4 * middle] == other[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low
