"""The four lists of a text completion's logprobs, one entry a token."""

from __future__ import annotations

from collections.abc import Sequence

from m1serve.api.logprobs import LOWEST
from m1serve.chat.tokenizer import ChatTokenizer, Detokenizer
from m1serve.types import TopLogprob

Lists = dict[str, list[object] | None]
"""`top_logprobs` is None when none were asked for."""


class TextLogprobs:
    """Of one choice; call in the order of its tokens, echoed prompt first."""

    def __init__(self, tokenizer: ChatTokenizer, *, has_top: bool) -> None:
        self._tokenizer, self._has_top = tokenizer, has_top
        self._text = Detokenizer(tokenizer)
        self._offset = 0

    def of_prompt(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        top: Sequence[tuple[TopLogprob, ...]],
    ) -> Lists:
        """`logprobs` and `top` are of ids[1:]; the first token follows nothing and has none."""
        value = self._lists(ids, [None, *logprobs])
        self._offset += len(self._text.flush())
        rows = self._rows(ids[1:], logprobs, top)
        return value | {"top_logprobs": [None, *rows] if self._has_top else None}

    def of_answer(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        top: Sequence[tuple[TopLogprob, ...]],
    ) -> Lists:
        value = self._lists(ids, logprobs)
        rows = self._rows(ids, logprobs, top)
        return value | {"top_logprobs": rows if self._has_top else None}

    def _rows(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        top: Sequence[tuple[TopLogprob, ...]],
    ) -> list[object]:
        if not self._has_top:
            return []
        return [
            {self._name(t.token_id): max(t.logprob, LOWEST) for t in row}
            # the token itself is always among them, as in OpenAI's answers
            | {self._name(token_id): max(logprob, LOWEST)}
            for row, token_id, logprob in zip(top, ids, logprobs, strict=True)
        ]

    def _lists(self, ids: Sequence[int], logprobs: Sequence[float | None]) -> Lists:
        offsets: list[object] = []
        for token_id in ids:
            offsets.append(self._offset)
            self._offset += len(self._text.push([token_id]))
        return {
            "tokens": [self._name(token_id) for token_id in ids],
            "token_logprobs": [None if p is None else max(p, LOWEST) for p in logprobs],
            "text_offset": offsets,
        }

    def _name(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            # OpenAI's spelling: part of a character must not look like another token
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def joined(prompt: Lists, answer: Lists) -> Lists:
    value: Lists = {}
    for name, after in answer.items():
        before = prompt[name]
        value[name] = None if before is None or after is None else [*before, *after]
    return value
