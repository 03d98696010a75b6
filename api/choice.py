"""One choice while it is generated: engine deltas in, reply events out, and all that is kept."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from m1serve.chat.messages import ChatMessage
from m1serve.chat.raw_reply import RawReply
from m1serve.chat.reply import CallStarted, ReplyEvent, ReplyParser, count_reasoning_tokens
from m1serve.chat.stops import StopMatcher
from m1serve.chat.tokenizer import ChatTokenizer, Detokenizer
from m1serve.types import Delta, StopCause, ToolCall, TopLogprob, VersionSpan

_FINISH_REASON = {
    StopCause.LENGTH: "length",
    StopCause.CONTEXT: "length",
    StopCause.REPETITION: "stop",
    StopCause.ABORT: "abort",
    StopCause.ERROR: "error",
}


class ChoiceStream:
    """detokenise, trim stop strings, parse: the one pipeline of both response modes."""

    def __init__(
        self,
        index: int,
        tok: ChatTokenizer,
        *,
        stop_strings: Sequence[str],
        parser: ReplyParser | RawReply,
        is_thinking: bool = False,
    ) -> None:
        """`is_thinking`: the prompt has opened the think block."""
        self.index = index
        self.turn_id = uuid.uuid4().hex
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.sampled_logprobs: list[float] | None = None
        self.token_flags: list[int] = []
        self.top_logprobs: list[tuple[TopLogprob, ...]] = []
        self.spans: list[VersionSpan] = []
        self.stop: StopCause | None = None
        self.stop_detail: str | None = None
        self.call_ids: list[str] = []
        self._tok, self._is_thinking = tok, is_thinking
        self._detokenizer = Detokenizer(tok)
        self._matcher = StopMatcher(stop_strings)
        self._parser = parser

    def push(self, delta: Delta) -> list[ReplyEvent]:
        self._keep(delta)
        shown = delta.token_ids
        if delta.stop is StopCause.STOP_TOKEN:
            shown = shown[:-1]
        # end-of-sentence always stops, so it is never text wherever the engine cut its deltas
        text = self._detokenizer.push([i for i in shown if i != self._tok.eos_id])
        if delta.stop is not None:
            text += self._detokenizer.flush()
        text, hit = self._matcher.push(text)
        if delta.stop is None:
            return self._named(self._parser.push(text))
        if hit is None:
            text += self._matcher.flush()
        return self._named([*self._parser.push(text), *self._parser.finish()])

    def cut(self, stop: StopCause, detail: str) -> None:
        """The stream ended without a last delta."""
        self.stop, self.stop_detail = stop, detail

    @property
    def finish_reason(self) -> str:
        if self.stop in _FINISH_REASON:
            return _FINISH_REASON[self.stop]
        # a client takes "tool_calls" as leave to carry them out
        is_whole = self.call_ids and not self._parser.has_broken_call
        return "tool_calls" if is_whole else "stop"

    @property
    def num_shown(self) -> int:
        """Tokens without the end-of-sentence: those that logprobs are shown of."""
        return len(self.token_ids) - (self.token_ids[-1:] == [self._tok.eos_id])

    @property
    def num_reasoning_tokens(self) -> int:
        return count_reasoning_tokens(self._tok, self.token_ids, is_open=self._is_thinking)

    @property
    def message(self) -> ChatMessage:
        """As it is returned to the client."""
        reply = self._parser.parsed()
        return ChatMessage(
            role="assistant",
            content=reply.content,
            reasoning=reply.reasoning,
            tool_calls=tuple(
                ToolCall(name=call.name, arguments=call.arguments, id=call_id)
                for call, call_id in zip(reply.tool_calls, self.call_ids, strict=True)
            ),
        )

    def _keep(self, delta: Delta) -> None:
        start, end = len(self.token_ids), len(self.token_ids) + len(delta.token_ids)
        if delta.sampled_logprobs is not None and self.sampled_logprobs is None:
            # so far both distributions were the same, by the engine's contract
            self.sampled_logprobs = list(self.logprobs)
        if self.sampled_logprobs is not None:
            self.sampled_logprobs += delta.sampled_logprobs or delta.logprobs
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.token_flags += delta.token_flags
        self.top_logprobs += delta.top_logprobs
        if end > start:
            last = self.spans[-1] if self.spans else None
            if last is not None and last.weights_version == delta.weights_version:
                self.spans.pop()
                start = last.start
            self.spans.append(
                VersionSpan(start=start, end=end, weights_version=delta.weights_version)
            )
        self.stop, self.stop_detail = delta.stop, delta.stop_detail

    def _named(self, events: list[ReplyEvent]) -> list[ReplyEvent]:
        for event in events:
            if isinstance(event, CallStarted):
                self.call_ids.append(f"call_{uuid.uuid4().hex[:24]}")
        return events
