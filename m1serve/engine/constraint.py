"""Constraint: one choice under a grammar, from its first token to its last. No torch.

It follows the text: thinking stays free, the grammar binds where Grammar.start says. An
end-of-sentence is allowed exactly where the grammar may end; inside the think block of a reply
that has to follow a grammar it closes the block instead.
"""

from __future__ import annotations

from enum import Enum, auto

from llguidance import LLMatcher

from m1serve.chat.tokenizer import CALLS, THINK, THINK_END, ChatTokenizer
from m1serve.engine.tag_tokens import TagTokens, closing_ids, num_matched
from m1serve.types import GenerateRequest, GrammarStart

_THINK, _THINK_END, _CALLS = THINK.encode(), THINK_END.encode(), CALLS.encode()
_TAIL_TOKENS = 16
"""Of the prompt: it may have opened the think block."""


class _Phase(Enum):
    OPENING = auto()
    """Nothing tells yet whether a think block comes."""
    THINKING = auto()
    TEXT = auto()
    """Free until a call block opens."""
    BOUND = auto()


class Constraint:
    """Ask `mask` before a token is drawn and `observe` every token, forced ones too."""

    def __init__(
        self,
        matcher: LLMatcher,
        request: GenerateRequest,
        *,
        tokenizer: ChatTokenizer,
        tags: TagTokens,
    ) -> None:
        """`matcher` is this choice's own."""
        assert request.grammar is not None, "a request without a grammar has no constraint"
        self._matcher, self._tokenizer, self._tags = matcher, tokenizer, tags
        self._binds_reply = request.grammar.start is GrammarStart.REPLY
        self._text = b""
        self._fits = True
        tail = tokenizer.decode(request.prompt_ids[-_TAIL_TOKENS:])
        self._phase = _Phase.THINKING if tail.rstrip().endswith(THINK) else _Phase.OPENING
        self.forced: list[int] = []
        """Tokens that must come next, whatever is drawn."""
        self.is_masking = False
        """Whether the last `mask` excluded anything."""
        self.error: str | None = None
        """Why this choice cannot go on."""

    def mask(self) -> bytes | None:
        """Packed bits of the allowed tokens, lowest first; None where everything is."""
        mask = None if self.error else self._current_mask()
        self.is_masking = mask is not None
        return mask

    def allows(self, token_id: int) -> bool:
        """As `mask` has it, or as another spelling of what the mask allows one spelling of."""
        mask = self.mask()
        if mask is None or mask[token_id >> 3] >> (token_id & 7) & 1:
            return True
        return self._fits and self._matcher.validate_tokens([token_id]) == 1

    @property
    def is_thinking(self) -> bool:
        """Inside the think block before a reply that has to follow the grammar."""
        return self._phase is _Phase.THINKING and self._binds_reply

    def consider(self, token_id: int) -> None:
        """A sentence that would end inside the think block forces the block's end instead."""
        if self.is_thinking and token_id == self._tokenizer.eos_id and not self.forced:
            self.forced = closing_ids(self._tokenizer, self._text)

    def observe(self, token_id: int) -> None:
        if self.forced:
            self.forced.pop(0)
        if token_id == self._tokenizer.eos_id:
            return
        if self._phase is _Phase.BOUND:
            self._consume([token_id])
        else:
            self._follow(token_id, self._tokenizer.token_bytes(token_id))

    def _current_mask(self) -> bytes | None:
        if self._phase is _Phase.BOUND:
            return self._grammar_mask()
        if self._phase is _Phase.THINKING:
            matched = num_matched(_THINK_END, self._text)
            return self._tags.unless_overrun(_THINK_END, matched) if self._binds_reply else None
        if not self._binds_reply:
            return self._tags.unless_overrun(_CALLS, num_matched(_CALLS, self._text))
        openers = self._tags.openers(len(self._text))
        mask = self._grammar_mask() if self._fits else bytes(self._tags.num_bytes)
        if mask is None:
            return None
        merged = int.from_bytes(mask, "little") | openers
        return merged.to_bytes(len(mask), "little")

    def _grammar_mask(self) -> bytes | None:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._fail(self._matcher.get_error())
        elif mask.count(0) == len(mask):
            self._fail("no token can follow")
        return None if self.error else mask

    def _follow(self, token_id: int, piece: bytes) -> None:
        self._text += piece
        if self._phase is _Phase.OPENING:
            self._open(token_id)
        elif self._phase is _Phase.THINKING:
            self._think()
        if self._phase is _Phase.TEXT:
            self._wait_for_calls()

    def _open(self, token_id: int) -> None:
        text = self._text.lstrip()
        if text.startswith(_THINK):
            self._matcher.reset()
            self._text, self._phase = text[len(_THINK) :], _Phase.THINKING
            self._think()
            return
        self._text, is_open = text, _THINK.startswith(text)
        if self._binds_reply:
            self._fits = self._fits and self._matcher.try_consume_tokens([token_id]) == 1
            if not is_open:
                self._phase = _Phase.BOUND
                if not self._fits:
                    self._fail("the reply began with neither a think block nor what may follow it")
        elif not is_open:
            self._phase = _Phase.TEXT

    def _think(self) -> None:
        _, hit, rest = self._text.partition(_THINK_END)
        if not hit:
            self._text = self._text[1 - len(_THINK_END) :]
        elif self._binds_reply:
            self._bind(rest)
        else:
            self._text, self._phase = rest, _Phase.TEXT

    def _wait_for_calls(self) -> None:
        _, hit, rest = self._text.partition(_CALLS)
        if hit:
            self._bind(rest)
        else:
            self._text = self._text[1 - len(_CALLS) :]

    def _bind(self, rest: bytes) -> None:
        """`rest` came in the token that completed the tag; its line breaks belong to the tag."""
        self._phase, self._text = _Phase.BOUND, b""
        rest = rest.lstrip(b"\n")
        if rest:
            self._consume(self._tokenizer.encode_text(rest.decode("utf-8", "replace")))

    def _consume(self, ids: list[int]) -> None:
        if self._matcher.try_consume_tokens(ids) != len(ids):
            self._fail(self._matcher.get_error() or "a token came that it does not allow")

    def _fail(self, why: str) -> None:
        self.error = f"the grammar cannot be followed any further: {why.splitlines()[0]}"
