"""One request from the engine's first item to the record in the journal."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

import anyio

from m1serve.api.choice import ChoiceStream
from m1serve.api.prepare import Prepared
from m1serve.api.record import delivery_record, turn_record
from m1serve.api.serving import Serving
from m1serve.chat.raw_reply import RawReply
from m1serve.chat.reply import ReplyEvent, ReplyParser, opens_think_block
from m1serve.errors import EngineError, OverloadedError, StoreError
from m1serve.types import Delta, Mode, Started, StopCause

logger = logging.getLogger(__name__)

CLIENT_GONE = "the client closed the connection"
CUT_SHORT = "the request ended before this choice did"


@dataclass(frozen=True, slots=True)
class Step:
    choice: ChoiceStream
    events: list[ReplyEvent]


class Exchange:
    """Iterate `steps` to its end and await `keep` before the last byte leaves, or close it; then
    call `settle` once.
    """

    def __init__(self, serving: Serving, prepared: Prepared) -> None:
        self.serving = serving
        self.prepared = prepared
        self.started: Started | None = None
        self.is_client_gone = False
        request = prepared.generate
        serving.sessions.enter(prepared.placement)
        is_thinking = opens_think_block(serving.tokenizer, request.prompt_ids)
        self.choices = [
            ChoiceStream(
                index,
                serving.tokenizer,
                stop_strings=request.stop_strings,
                parser=(
                    ReplyParser(parse_calls=bool(prepared.tools))
                    if prepared.messages
                    else RawReply()
                ),
                is_thinking=is_thinking,
            )
            for index in range(request.n)
        ]
        self._begun = time.perf_counter()
        self._ttft_s: float | None = None
        self._is_kept = False

    @property
    def session_id(self) -> str:
        return self.prepared.session_id

    @property
    def weights_version(self) -> str:
        """Of the newest token, or what a new request gets."""
        for choice in reversed(self.choices):
            if choice.spans:
                return choice.spans[-1].weights_version
        return self.started_version

    @property
    def started_version(self) -> str:
        """What the request began with, or what a new one gets."""
        return self.started.weights_version if self.started else self.serving.engine.weights_version

    @property
    def has_ended(self) -> bool:
        """Every choice has stopped."""
        return all(choice.stop is not None for choice in self.choices)

    async def steps(self) -> AsyncGenerator[Started | Step, None]:
        """Raises what the engine raises; EngineError or OverloadedError when a choice broke off."""
        items = self.serving.engine.generate(self.prepared.generate)
        try:
            async for item in items:
                if isinstance(item, Started):
                    self.started = item
                    yield item
                else:
                    yield self._step(item)
            self._require_ends()
        finally:
            with anyio.CancelScope(shield=True):
                await _close(items)

    async def abort(self) -> None:
        """The client is gone: the engine ends the choices, `steps` then ends by itself."""
        self.is_client_gone = True
        try:
            await self.serving.engine.abort(self.prepared.generate.id)
        except EngineError as error:
            # closing the stream frees the slots all the same
            logger.warning("request %s: %s", self.prepared.request_id, error)

    async def keep(self) -> None:
        """Returns when a kill of this process loses none of the finished choices any more."""
        if self._is_recorded:
            self.serving.require_capture()
            self._record()
            await self.serving.written()

    def settle(self, *, was_delivered: bool) -> None:
        """Journals what `keep` did not and whether the client has it; counts. Never waits."""
        for choice in self.choices:
            if choice.stop is None:
                choice.cut(StopCause.ABORT, CLIENT_GONE if self.is_client_gone else CUT_SHORT)
        try:
            if self._is_recorded and not self._is_kept:
                self._record()
            if self._is_recorded and was_delivered:
                self.serving.journal.append(delivery_record(self))
        except StoreError as error:
            # whether the client was told is settled already
            logger.error("request %s is not recorded: %s", self.prepared.request_id, error)
        self.serving.sessions.settle(self.prepared.placement, was_delivered=was_delivered)
        self._count(self._total_s)

    @property
    def ttft_ms(self) -> float:
        return (self._ttft_s or 0.0) * 1000

    @property
    def cached_tokens(self) -> int:
        return self.started.cached_tokens if self.started else 0

    @property
    def num_shown_logprobs(self) -> int:
        if not self.prepared.body.shows_logprobs:
            return 0
        num_tokens = sum(len(choice.token_ids) for choice in self.choices)
        return num_tokens * (1 + self.prepared.generate.top_logprobs)

    @property
    def num_shown_prompt(self) -> int:
        """Prompt tokens that are written, as ids once and as text with every choice."""
        body = self.prepared.body
        times = bool(body.return_token_ids) + len(self.choices) * bool(getattr(body, "echo", False))
        return times * len(self.prepared.generate.prompt_ids)

    def usage(self) -> dict[str, object]:
        prompt = len(self.prepared.generate.prompt_ids)
        completion = sum(len(choice.token_ids) for choice in self.choices)
        reasoning = sum(choice.num_reasoning_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "completion_tokens_details": {"reasoning_tokens": reasoning},
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    @property
    def _total_s(self) -> float:
        return time.perf_counter() - self._begun

    @property
    def _is_recorded(self) -> bool:
        return self.started is not None and self.prepared.labels.mode is not Mode.OFF

    def _record(self) -> None:
        self._is_kept = True
        for choice in self.choices:
            record = turn_record(self, choice, total_ms=self._total_s * 1000)
            self.serving.journal.append(record)

    def _step(self, delta: Delta) -> Step:
        if self._ttft_s is None and delta.token_ids:
            self._ttft_s = time.perf_counter() - self._begun
        choice = self.choices[delta.choice]
        events = choice.push(delta)
        if delta.stop in (StopCause.ABORT, StopCause.ERROR):
            self._require_delivery(choice)
        elif delta.stop is not None:
            self._remember(choice)
        return Step(choice, events)

    def _require_delivery(self, choice: ChoiceStream) -> None:
        detail = choice.stop_detail or "no detail"
        if choice.stop is StopCause.ERROR:
            raise EngineError(f"the engine failed while generating: {detail}")
        if not self.is_client_gone:
            raise OverloadedError(f"the server aborted this request: {detail}; send it again")

    def _require_ends(self) -> None:
        if not self.has_ended:
            raise EngineError("the engine ended its stream before every choice had stopped")

    def _remember(self, choice: ChoiceStream) -> None:
        """Before the last byte is sent: the client's next request may be here at once."""
        prepared, message = self.prepared, choice.message
        if not prepared.messages:
            # as a client replays it: what stopped the text is not in it
            is_token = choice.stop is StopCause.STOP_TOKEN
            ids = choice.token_ids[: choice.num_shown - is_token]
            self.serving.sessions.completed(prepared.placement, ids)
            return
        self.serving.sessions.answered(prepared.placement, message, prepared.chain)
        if prepared.packed_ids is not None:
            self.serving.history.remember(
                prepared.caller.tenant_id,
                prepared.body.model,
                (*prepared.messages, message),
                prepared.tools,
                prepared.packed_ids + array("i", choice.token_ids),
                system_end=prepared.system_end,
                session_id=prepared.session_id,
                chain=prepared.chain,
            )

    def _count(self, total_s: float) -> None:
        metrics, prepared = self.serving.metrics, self.prepared
        for choice in self.choices:
            metrics.turns.labels(prepared.labels.mode, choice.stop or "none").inc()
        metrics.prompt_tokens.inc(len(prepared.generate.prompt_ids))
        metrics.cached_tokens.inc(self.cached_tokens)
        metrics.completion_tokens.inc(sum(len(choice.token_ids) for choice in self.choices))
        metrics.generation_seconds.observe(total_s)
        if self._ttft_s is not None and prepared.is_stream:
            metrics.ttft_seconds.observe(self._ttft_s)


async def _close(items: AsyncIterator[Started | Delta]) -> None:
    """Closing an engine's generator frees the request's slots."""
    close = getattr(items, "aclose", None)
    if close is not None:
        await close()
