"""When a choice ends, and what a reasoning budget makes it say. Pure: tokens in, causes out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from m1serve.chat.stops import StopMatcher
from m1serve.chat.tokenizer import ChatTokenizer, Detokenizer
from m1serve.engine.tag_tokens import closing_ids
from m1serve.engine.thinking import ThinkBlock, ThinkPlace
from m1serve.types import GenerateRequest, RepetitionStop, StopCause


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    cause: StopCause
    detail: str | None = None


class StopRules:
    """The rules of one choice; call `after` once for each token, in order."""

    __slots__ = (
        "_answer_tokens",
        "_eos_id",
        "_length_stop",
        "_max_tokens",
        "_run",
        "_stop_ids",
        "_strings",
        "_thought",
    )

    def __init__(
        self, request: GenerateRequest, *, tokenizer: ChatTokenizer, max_model_len: int
    ) -> None:
        self._eos_id = tokenizer.eos_id
        self._stop_ids = frozenset((*request.sampling.stop_token_ids, tokenizer.eos_id))
        self._strings = (
            StopStrings(request.stop_strings, tokenizer) if request.stop_strings else None
        )
        self._answer_tokens = request.limits.answer_tokens
        self._thought = (
            None if self._answer_tokens is None else ThinkBlock(tokenizer, request.prompt_ids)
        )
        repetition = request.limits.repetition
        self._run = None if repetition is None else SureRun(repetition)
        room = max_model_len - len(request.prompt_ids)
        self._max_tokens = min(request.limits.max_tokens, room)
        is_cut = room < request.limits.max_tokens
        self._length_stop = Stop(cause=StopCause.CONTEXT if is_cut else StopCause.LENGTH)

    def before_any(self) -> Stop | None:
        """A choice that may say nothing at all ends where its prompt ends."""
        return self._length_stop if self._max_tokens <= 0 else None

    def after(self, token_id: int, num_tokens: int, logprob: float | None) -> Stop | None:
        """`num_tokens` counts this token; `logprob` is the model's own, None when it was forced."""
        is_repeating = self._run is not None and self._run.push(logprob)
        if self._thought is not None:
            self._thought.observe(token_id)
        if token_id in self._stop_ids:
            if token_id == self._eos_id:
                return Stop(cause=StopCause.EOS)
            return Stop(cause=StopCause.STOP_TOKEN, detail=str(token_id))
        if self._strings is not None and (hit := self._strings.push(token_id)) is not None:
            return Stop(cause=StopCause.STOP_STRING, detail=hit)
        if self._run is not None and is_repeating:
            return Stop(cause=StopCause.REPETITION, detail=str(self._run.num_tokens))
        if self._has_answered(num_tokens):
            return Stop(cause=StopCause.LENGTH)
        return self._length_stop if num_tokens >= self._max_tokens else None

    def _has_answered(self, num_tokens: int) -> bool:
        thought, most = self._thought, self._answer_tokens
        if thought is None or most is None or thought.place is ThinkPlace.INSIDE:
            return False
        return num_tokens - thought.num_tokens >= most


class SureRun:
    """Counts sampled tokens in a row that the model was all but certain of.

    On the host, from the logprob that every sampled token brings along: exact in every engine, and
    nothing for the device to do.
    """

    __slots__ = ("_floor", "_most", "num_tokens")

    def __init__(self, repetition: RepetitionStop) -> None:
        self._most = repetition.num_tokens
        self._floor = math.log(repetition.probability) if repetition.probability > 0 else -math.inf
        self.num_tokens = 0

    def push(self, logprob: float | None) -> bool:
        """Whether the run is long enough to stop; None is a token that the model did not choose."""
        if logprob is None:
            return False
        if logprob > self._floor:
            self.num_tokens += 1
            return self.num_tokens >= self._most
        self.num_tokens = 0
        return False


class StopStrings:
    """Finds the token that completes a stop string."""

    __slots__ = ("_matcher", "_text")

    def __init__(self, strings: tuple[str, ...], tokenizer: ChatTokenizer) -> None:
        self._text = Detokenizer(tokenizer)
        self._matcher = StopMatcher(strings)

    def push(self, token_id: int) -> str | None:
        return self._matcher.push(self._text.push([token_id]))[1]


class ThinkBudget:
    """Counts the tokens of the think block; used up, `forced` holds what must follow."""

    __slots__ = ("_block", "_left", "_tokenizer", "forced")

    def __init__(
        self, budget_tokens: int, *, tokenizer: ChatTokenizer, prompt_ids: tuple[int, ...]
    ) -> None:
        self._tokenizer, self._left = tokenizer, budget_tokens
        self._block = ThinkBlock(tokenizer, prompt_ids)
        self.forced: list[int] = []
        """Next token first."""
        self._close_if_used_up()

    def observe(self, token_id: int) -> None:
        was_inside = self._block.place is ThinkPlace.INSIDE
        self._block.observe(token_id)
        if self.forced:
            self.forced.pop(0)
            return
        if was_inside:
            self._left -= 1
        self._close_if_used_up()

    def _close_if_used_up(self) -> None:
        if self._block.place is ThinkPlace.INSIDE and self._left <= 0:
            self.forced = closing_ids(self._tokenizer, self._block.tail)
