"""Line: one choice of a scripted reply as it is spoken, token by token. No torch."""

from __future__ import annotations

from collections import deque

from m1serve.chat.tokenizer import THINK_END, ChatTokenizer
from m1serve.engine.constraint import Constraint
from m1serve.engine.script import made_up_logprob, made_up_top
from m1serve.engine.stopping import Stop, StopRules, ThinkBudget
from m1serve.types import Delta, GenerateRequest, StopCause, TokenFlag, TopLogprob


class Line:
    def __init__(
        self,
        request: GenerateRequest,
        text: str,
        *,
        choice: int,
        tokenizer: ChatTokenizer,
        max_model_len: int,
        constraint: Constraint | None = None,
    ) -> None:
        self._constraint = constraint
        self._request, self._choice = request, choice
        self._rules = StopRules(request, tokenizer=tokenizer, max_model_len=max_model_len)
        self._budget = _budget_of(request, tokenizer)
        self._eos_id = tokenizer.eos_id
        self._script = deque((*tokenizer.encode_control(text), tokenizer.eos_id))
        self._bytes_of = tokenizer.token_bytes
        self._is_closing = False
        """Within the tokens that close the think block."""
        self._before = request.prompt_ids[-1]
        self._num_said = 0
        self._clear()
        self.stop: Stop | None = self._rules.before_any()

    @property
    def has_unsent(self) -> bool:
        return bool(self._ids)

    def say(self, fails_after: int | None) -> bool:
        """The next token, unless it has stopped; True when there was one."""
        if self.stop is not None:
            return False
        if fails_after is not None and self._num_said >= fails_after:
            self.stop = Stop(cause=StopCause.ERROR, detail="the script fails here")
            return False
        drawn = self._next_token()
        if drawn is None:
            return False
        token_id, flag = drawn
        logprob = made_up_logprob(self._before, token_id)
        self._ids.append(token_id)
        self._logprobs.append(logprob)
        self._flags.append(flag.value)
        if self._request.top_logprobs:
            self._top.append(made_up_top(token_id, logprob, self._request.top_logprobs))
        self._before = token_id
        self._num_said += 1
        own = None if flag is TokenFlag.FORCED else logprob
        self.stop = self._rules.after(token_id, self._num_said, own)
        return True

    def delta(self, weights_version: str) -> Delta:
        """Everything since the last one."""
        sampling = self._request.sampling
        is_bent = not (sampling.is_trainable and sampling.top_p == 1.0) or self._constraint
        delta = Delta(
            choice=self._choice,
            token_ids=tuple(self._ids),
            logprobs=tuple(self._logprobs),
            token_flags=tuple(self._flags),
            weights_version=weights_version,
            sampled_logprobs=tuple(self._logprobs) if is_bent else None,
            top_logprobs=tuple(self._top),
            stop=self.stop.cause if self.stop else None,
            stop_detail=self.stop.detail if self.stop else None,
        )
        self._clear()
        return delta

    def _clear(self) -> None:
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._flags: list[int] = []
        self._top: list[tuple[TopLogprob, ...]] = []

    def _next_token(self) -> tuple[int, TokenFlag] | None:
        """None, and it has stopped, when the script breaks the request's grammar."""
        constraint, forced = self._constraint, self._forced
        if not forced and constraint is not None and self._script:
            constraint.consider(self._script[0])
            forced = self._forced
        if forced:
            token_id, flag = forced[0], TokenFlag.FORCED
            if not self._is_closing:
                self._skip_thought(forced)
            self._is_closing = len(forced) > 1
        else:
            # behind a thought that never closed there is nothing but the end
            token_id = self._script.popleft() if self._script else self._eos_id
            if not self._keeps_grammar(token_id):
                return None
            is_masked = constraint is not None and constraint.is_masking
            flag = TokenFlag.SAMPLED | TokenFlag.MASKED if is_masked else TokenFlag.SAMPLED
        if self._budget is not None:
            self._budget.observe(token_id)
        if constraint is not None:
            constraint.observe(token_id)
        return token_id, flag

    @property
    def _forced(self) -> list[int]:
        if self._budget is not None and self._budget.forced:
            return self._budget.forced
        return [] if self._constraint is None else self._constraint.forced

    def _keeps_grammar(self, token_id: int) -> bool:
        constraint = self._constraint
        if constraint is None or (constraint.allows(token_id) and constraint.error is None):
            return True
        why = constraint.error or f"token {self._num_said} may not be {token_id}"
        self.stop = Stop(
            cause=StopCause.ERROR, detail=f"the scripted reply breaks the request's grammar: {why}"
        )
        return False

    def _skip_thought(self, closing: list[int]) -> None:
        """The script goes on behind its own end of the think block, if it has one."""
        num_thought = self._num_to_end_tag(closing)
        for _ in range(num_thought):
            self._script.popleft()
        if num_thought and self._script[0] == closing[-1]:
            # the line break behind the tag
            self._script.popleft()

    def _num_to_end_tag(self, closing: list[int]) -> int:
        """Tokens of the script up to the one that completes the tag; 0 where none does."""
        tag = THINK_END.encode()
        missing = b"".join(map(self._bytes_of, closing)).rstrip(b"\n")
        text = tag.removesuffix(missing)
        for num, token_id in enumerate(self._script, start=1):
            text = text[1 - len(tag) :] + self._bytes_of(token_id)
            if tag in text:
                return num
        return 0


def _budget_of(request: GenerateRequest, tokenizer: ChatTokenizer) -> ThinkBudget | None:
    budget = request.limits.reasoning_budget
    if budget is None:
        return None
    return ThinkBudget(budget, tokenizer=tokenizer, prompt_ids=request.prompt_ids)
