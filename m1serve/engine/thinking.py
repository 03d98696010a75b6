"""Where a choice stands in its think block, whose tags may be one token or several. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from m1serve.chat.reply import opens_think_block
from m1serve.chat.tokenizer import THINK, THINK_END, ChatTokenizer

_OPEN, _END = THINK.encode(), THINK_END.encode()


class ThinkPlace(Enum):
    BEFORE = "before"
    """Nothing but blanks so far: a block may still open."""
    INSIDE = "inside"
    BEHIND = "behind"
    """The block was closed, or there is none: this is the answer."""


class ThinkBlock:
    """A leading block only, as in the reply's parser; `observe` every token once, in order."""

    __slots__ = ("_num_blank", "_seen", "_tokenizer", "num_tokens", "place")

    def __init__(self, tokenizer: ChatTokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        is_open = opens_think_block(tokenizer, prompt_ids)
        self.place = ThinkPlace.INSIDE if is_open else ThinkPlace.BEFORE
        self.num_tokens = 0
        """Sampled tokens of the block, tags and blanks before it too; 0 where there is none."""
        self._num_blank = 0
        self._seen = b""

    @property
    def tail(self) -> bytes:
        """The end of the block's text, as long as its end tag at most."""
        return self._seen[-len(_END) :]

    def observe(self, token_id: int) -> None:
        if self.place is ThinkPlace.BEHIND:
            return
        self.num_tokens += 1 + self._num_blank
        self._num_blank = 0
        self._seen += self._tokenizer.token_bytes(token_id)
        if self.place is ThinkPlace.BEFORE:
            self._look_for_start()
        elif _END in self._seen:
            self.place = ThinkPlace.BEHIND
        else:
            self._seen = self._seen[-len(_END) :]

    def _look_for_start(self) -> None:
        text = self._seen.lstrip()
        if text.startswith(_OPEN):
            self.place, self._seen = ThinkPlace.INSIDE, text[len(_OPEN) :]
        elif not text:
            # an answer of blanks is an answer, until a block opens behind them
            self._num_blank, self.num_tokens, self._seen = self.num_tokens, 0, b""
        elif not _OPEN.startswith(text):
            self.place, self.num_tokens = ThinkPlace.BEHIND, 0
