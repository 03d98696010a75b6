"""ScriptedEngine: plays given replies with ids and logprobs, to test everything around an engine.

It keeps the whole contract (limits, stop rules, aborts, pins, swaps) but has no model and no torch.
A reply that breaks the request's grammar ends with an error where it does.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings
from m1serve.engine.admission import check_prompt, check_request, deferral, unknown_pin
from m1serve.engine.grammar_compiler import GrammarCompiler, NewConstraint
from m1serve.engine.line import Line
from m1serve.engine.script import (
    Replies,
    ScriptedReply,
    made_up_logprob,
    made_up_top,
    replies_from_file,
)
from m1serve.engine.stopping import Stop
from m1serve.errors import EngineError, OverloadedError, RequestError
from m1serve.types import (
    Capabilities,
    Delta,
    EngineStats,
    GenerateRequest,
    InFlight,
    Scored,
    Started,
    StopCause,
    SwapReport,
    VersionRef,
)

MAX_TOP_LOGPROBS = 20


class ScriptedEngine:
    def __init__(
        self,
        replies: Replies | Path,
        *,
        tokenizer: ChatTokenizer,
        settings: EngineSettings | None = None,
        weights_version: str = "scripted@0",
    ) -> None:
        if isinstance(replies, Path):
            replies = replies_from_file(replies, tokenizer)
        self._replies = replies
        self._tokenizer, self._compiler = tokenizer, GrammarCompiler(tokenizer)
        self._settings = settings or EngineSettings(kind="scripted")
        self._weights_version = weights_version
        self._playing: dict[str, _Play] = {}
        self._waiting: list[tuple[int, int, _Play]] = []
        self._orders = itertools.count()
        self._is_closed = False
        self._sampled_tokens = self._prefilled_tokens = self._cached_tokens = 0
        self._num_swaps = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            max_model_len=self._settings.max_model_len,
            vocab_size=self._tokenizer.vocab_size,
            max_top_logprobs=MAX_TOP_LOGPROBS,
            in_flight=frozenset({InFlight.FINISH, InFlight.RECOMPUTE}),
            has_prompt_logprobs=True,
            has_grammar=True,
            has_penalties=True,
            has_reasoning_budget=True,
        )

    @property
    def weights_version(self) -> str:
        return self._weights_version

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Started | Delta]:
        check_request(request, self.capabilities)
        play = self._enter(request, await self._compiler.constraints(request))
        try:
            await play.has_slot.wait()
            play.weights_version = request.weights_pin or self._weights_version
            yield self._started(play)
            await play.pause(play.reply.delay_s)
            while play.lines:
                for delta in self._round(play):
                    yield delta
                await play.pause(play.reply.step_s if play.lines else 0.0)
        finally:
            self._leave(play)

    async def abort(self, request_id: str) -> None:
        play = self._playing.get(request_id)
        if play is not None:
            play.is_aborted.set()
            play.has_slot.set()

    async def score(
        self, token_ids: Sequence[int], *, weights_version: str | None = None
    ) -> Scored:
        ids = tuple(token_ids)
        check_prompt(ids, self.capabilities)
        self._check_pin(weights_version)
        return Scored(
            weights_version=weights_version or self._weights_version, logprobs=_logprobs_of(ids)
        )

    async def load(self, version: VersionRef) -> SwapReport:
        """Accepts any version whose directory exists; there are no weights to verify."""
        deferred = deferral(version, self._held, self._settings.max_held_versions)
        if deferred is not None:
            return deferred
        if not await asyncio.to_thread(Path(version.path).is_dir):
            return SwapReport(
                weights_version=self._weights_version,
                is_accepted=False,
                reason=f"no version directory at {version.path}",
                phases_ms={},
            )
        if version.weights_version != self._weights_version:
            self._weights_version = version.weights_version
            self._num_swaps += 1
        return SwapReport(
            weights_version=version.weights_version,
            is_accepted=True,
            reason="",
            phases_ms={"stage": 0.0, "verify": 0.0, "switch": 0.0},
            parity_mean=0.0,
            parity_max=0.0,
        )

    def stats(self) -> EngineStats:
        running = [play for play in self._playing.values() if play.is_running]
        return EngineStats(
            num_running=sum(len(play.lines) for play in running),
            num_waiting=len(self._playing) - len(running),
            num_slots=self._settings.num_slots,
            versions=self._held,
            sampled_tokens=self._sampled_tokens,
            prefilled_tokens=self._prefilled_tokens,
            cached_tokens=self._cached_tokens,
            num_swaps=self._num_swaps,
        )

    async def close(self) -> None:
        self._is_closed = True
        self._compiler.close()
        for request_id in list(self._playing):
            await self.abort(request_id)

    @property
    def _held(self) -> tuple[str, ...]:
        old = {play.weights_version for play in self._playing.values() if play.is_running}
        return (*sorted(old - {self._weights_version}), self._weights_version)

    def _check_pin(self, pin: str | None) -> None:
        if pin is not None and pin not in self._held:
            raise unknown_pin(pin, self._held)

    def _enter(self, request: GenerateRequest, new_constraint: NewConstraint) -> _Play:
        """A place in the queue, or a slot at once."""
        if self._is_closed:
            raise EngineError("the engine is closed")
        if request.id in self._playing:
            raise RequestError(f"request id {request.id!r} is running already; use a fresh one")
        self._check_pin(request.weights_pin)
        num_waiting = sum(not play.is_running for play in self._playing.values())
        if num_waiting >= self._settings.max_waiting:
            raise OverloadedError(f"{num_waiting} requests are waiting; try again later")
        reply = self._replies(request)
        play = _Play(request=request, reply=reply)
        play.lines = [
            Line(
                request,
                reply.text_of(i),
                choice=i,
                tokenizer=self._tokenizer,
                max_model_len=self._settings.max_model_len,
                constraint=new_constraint(),
            )
            for i in range(request.n)
        ]
        self._playing[request.id] = play
        heapq.heappush(self._waiting, (-request.priority, next(self._orders), play))
        self._give_slots()
        return play

    def _give_slots(self) -> None:
        num_running = sum(play.is_running for play in self._playing.values())
        while self._waiting and num_running < self._settings.num_slots:
            play = heapq.heappop(self._waiting)[2]
            play.is_running = True
            play.has_slot.set()
            num_running += 1

    def _leave(self, play: _Play) -> None:
        del self._playing[play.request.id]
        self._waiting = [entry for entry in self._waiting if entry[2] is not play]
        heapq.heapify(self._waiting)
        self._give_slots()

    def _started(self, play: _Play) -> Started:
        request = play.request
        num_cached = min(play.reply.cached_tokens, len(request.prompt_ids) - 1)
        self._cached_tokens += num_cached
        self._prefilled_tokens += len(request.prompt_ids) - num_cached
        logprobs = _logprobs_of(request.prompt_ids) if request.prompt_logprobs else None
        top = None
        if logprobs is not None and request.top_logprobs:
            pairs = zip(request.prompt_ids[1:], logprobs, strict=True)
            top = tuple(made_up_top(i, p, request.top_logprobs) for i, p in pairs)
        return Started(
            cached_tokens=num_cached,
            weights_version=play.weights_version,
            prompt_logprobs=logprobs,
            prompt_top_logprobs=top,
        )

    def _round(self, play: _Play) -> list[Delta]:
        """One token for every open choice; returns the deltas that are due."""
        deltas = []
        version = play.weights_version
        follows = play.request.in_flight is InFlight.RECOMPUTE and not play.request.weights_pin
        if follows and version != self._weights_version:
            deltas = [line.delta(version) for line in play.lines if line.has_unsent]
            version = play.weights_version = self._weights_version
        forced_stop = play.forced_stop
        is_due = play.is_delta_due()
        for line in list(play.lines):
            if forced_stop is not None:
                line.stop = forced_stop
            else:
                self._sampled_tokens += line.say(play.reply.fails_after)
            if line.stop is not None or is_due:
                deltas.append(line.delta(version))
        play.lines = [line for line in play.lines if line.stop is None]
        return deltas


@dataclass(slots=True, eq=False, kw_only=True)
class _Play:
    """A request on stage."""

    request: GenerateRequest
    reply: ScriptedReply
    lines: list[Line] = field(default_factory=list)
    """Of the choices that go on."""
    weights_version: str = ""
    is_running: bool = False
    has_slot: asyncio.Event = field(default_factory=asyncio.Event)
    is_aborted: asyncio.Event = field(default_factory=asyncio.Event)
    began_s: float = field(default_factory=time.monotonic)
    emit_at_s: float = 0.0

    @property
    def forced_stop(self) -> Stop | None:
        if self.is_aborted.is_set():
            return Stop(cause=StopCause.ABORT)
        limit = self.request.limits.deadline_s
        if limit is not None and time.monotonic() - self.began_s >= limit:
            return Stop(cause=StopCause.ABORT, detail="deadline")
        return None

    def is_delta_due(self) -> bool:
        interval, now = self.request.min_delta_interval_s, time.monotonic()
        if interval == float("inf") or now < self.emit_at_s:
            return False
        self.emit_at_s = now + interval
        return True

    async def pause(self, seconds: float) -> None:
        """Ends early when the request is aborted or its deadline comes."""
        if self.request.limits.deadline_s is not None:
            left = self.began_s + self.request.limits.deadline_s - time.monotonic()
            seconds = max(0.0, min(seconds, left))
        if seconds == 0.0:
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(seconds):
                await self.is_aborted.wait()
        except TimeoutError:
            return


def _logprobs_of(ids: Sequence[int]) -> tuple[float, ...]:
    return tuple(made_up_logprob(a, b) for a, b in itertools.pairwise(ids))
