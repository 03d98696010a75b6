"""Which tokens open, complete or overrun a tag, for constraints that begin at one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from m1serve.chat.tokenizer import CALLS, THINK, THINK_END, ChatTokenizer


class TagTokens:
    """Masks are packed bits, the lowest first, as many bytes as a matcher's."""

    def __init__(self, tokenizer: ChatTokenizer, *, num_bytes: int) -> None:
        pieces = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.num_bytes = num_bytes
        self._openers = self._openers_of(tokenizer, pieces)
        inner = [(i, piece) for i, piece in enumerate(pieces) if b">" in piece[:-1]]
        self._overruns = {
            tag: [self._without(_overrunning(tag, k, inner)) for k in range(len(tag))]
            for tag in (THINK_END.encode(), CALLS.encode())
        }

    def openers(self, num_matched: int) -> int:
        """Tokens that go on with `<think>`, of which so many bytes are there, as one number."""
        return self._openers[num_matched]

    def unless_overrun(self, tag: bytes, num_matched: int) -> bytes | None:
        """All tokens but those that complete the tag and go on; None when there are none such.

        A grammar reads whole tokens, so the tag has to end where a token does. Line breaks may
        follow: they belong to the tag.
        """
        return self._overruns[tag][num_matched]

    def _openers_of(self, tokenizer: ChatTokenizer, pieces: Sequence[bytes]) -> list[int]:
        tag, opener = THINK.encode(), tokenizer.control_ids.get(THINK)
        if opener is not None:
            # a tokenizer that has the tag never spells it
            return [1 << opener] + [0] * (len(tag) - 1)
        return [
            sum(1 << i for i, piece in enumerate(pieces) if _goes_on(tag[k:], piece))
            for k in range(len(tag))
        ]

    def _without(self, ids: Iterable[int]) -> bytes | None:
        excluded = sum(1 << i for i in ids)
        if not excluded:
            return None
        return ((1 << 8 * self.num_bytes) - 1 ^ excluded).to_bytes(self.num_bytes, "little")


def closing_ids(tokenizer: ChatTokenizer, text: bytes) -> list[int]:
    """What ends a think block whose text ends with `text`: of a tag that has begun only the rest.

    One `<` begins no tag: it may be anything.
    """
    begun = num_matched(THINK_END.encode(), text)
    return tokenizer.encode_control(f"{THINK_END[begun if begun > 1 else 0 :]}\n")


def num_matched(tag: bytes, text: bytes) -> int:
    """How many bytes of the tag the text ends with; less than all."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(tag[:size])), 0)


def _goes_on(rest: bytes, piece: bytes) -> bool:
    return bool(piece) and (rest.startswith(piece) or piece.startswith(rest))


def _overrunning(tag: bytes, matched: int, inner: Iterable[tuple[int, bytes]]) -> list[int]:
    found: list[int] = []
    for token_id, piece in inner:
        _, hit, rest = (tag[:matched] + piece).partition(tag)
        if hit and rest.strip(b"\n"):
            found.append(token_id)
    return found
