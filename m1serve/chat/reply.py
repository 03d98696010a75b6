"""What the model wrote, split into reasoning, content and tool calls; the same for any chunking.

`<think>\\n…\\n</think>\\n` comes first or not at all; `<tool_calls>` blocks hold JSON objects. Tags
inside the think block or inside JSON strings are text. What is no call goes to content as written:
nothing is repaired.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from m1serve.chat.reply_draft import (
    CallArguments,
    CallStarted,
    ContentText,
    ParsedReply,
    ReasoningText,
    ReplyEvent,
)
from m1serve.chat.reply_parser import ReplyParser
from m1serve.chat.tokenizer import THINK, THINK_END, ChatTokenizer
from m1serve.types import StopCause, Turn

__all__ = [
    "CallArguments",
    "CallStarted",
    "ContentText",
    "ParsedReply",
    "ReasoningText",
    "ReplyEvent",
    "ReplyParser",
    "count_reasoning_tokens",
    "opens_think_block",
    "parse_reply",
    "turn_from_ids",
    "without_stop",
]

_PROMPT_TAIL_TOKENS = 16
"""Enough for a tag of single characters and the line break behind it."""


def parse_reply(text: str, *, parse_calls: bool = True) -> ParsedReply:
    parser = ReplyParser(parse_calls=parse_calls)
    parser.push(text)
    parser.finish()
    return parser.parsed()


def turn_from_ids(
    tok: ChatTokenizer, *, turn_id: str, completion_ids: Sequence[int], stop: StopCause
) -> Turn:
    """A turn as scorers see it, from the ledger's ids."""
    text = tok.decode(without_stop(completion_ids, stop, tok.eos_id))
    reply = parse_reply(text)
    return Turn(
        turn_id=turn_id,
        text=text,
        reasoning=reply.reasoning,
        content=reply.content,
        tool_calls=reply.tool_calls,
        is_well_formed=reply.is_well_formed,
        stop=stop,
        num_tokens=len(completion_ids),
    )


def without_stop(ids: Sequence[int], stop: StopCause | None, eos_id: int) -> Sequence[int]:
    """The ids that are shown: the token that stopped the choice is not."""
    is_marker = stop is StopCause.STOP_TOKEN or (
        stop is StopCause.EOS and tuple(ids[-1:]) == (eos_id,)
    )
    return ids[:-1] if is_marker else ids


def opens_think_block(tok: ChatTokenizer, prompt_ids: Sequence[int]) -> bool:
    """Whether what follows the prompt is inside a think block from its first token on."""
    tail = b"".join(map(tok.token_bytes, prompt_ids[-_PROMPT_TAIL_TOKENS:]))
    return tail.rstrip().endswith(THINK.encode())


def count_reasoning_tokens(tok: ChatTokenizer, ids: Sequence[int], *, is_open: bool = False) -> int:
    """Tokens of a leading think block, its tags included: up to the one that completes the end tag.

    Found in the text, as the parser finds it: a tag may be spelled by several tokens. `is_open`:
    the prompt has the block's begin already.
    """
    shown = ids[:-1] if tuple(ids[-1:]) == (tok.eos_id,) else ids
    pieces = [tok.token_bytes(token_id) for token_id in shown]
    raw = b"".join(pieces)
    if not is_open and not raw.lstrip().startswith(THINK.encode()):
        return 0
    place = raw.find(THINK_END.encode())
    if place < 0:
        return len(shown)
    ends = list(accumulate(map(len, pieces)))
    return bisect_left(ends, place + len(THINK_END)) + 1
