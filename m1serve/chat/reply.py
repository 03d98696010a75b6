"""What the model wrote, split into reasoning, content and tool calls; the same for any chunking.

`<think>\\n…\\n</think>\\n` comes first or not at all; `<tool_calls>` blocks hold JSON objects. Tags
inside the think block or inside JSON strings are text. What is no call goes to content as written:
nothing is repaired.
"""

from __future__ import annotations

from collections.abc import Sequence

from m1serve.chat.reply_parser import (
    CallArguments,
    CallStarted,
    ContentText,
    ParsedReply,
    ReasoningText,
    ReplyEvent,
    ReplyParser,
)
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
    "parse_reply",
    "turn_from_ids",
    "without_stop",
]


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


def count_reasoning_tokens(tok: ChatTokenizer, ids: Sequence[int]) -> int:
    """Tokens of a leading think block, its tags included."""
    end, text = tok.control_ids.get(THINK_END), ""
    if THINK in tok.control_ids and end is not None:
        opening = next((token_id for token_id in ids if tok.token_bytes(token_id).strip()), None)
        if opening != tok.control_ids[THINK]:
            return 0
        return ids.index(end) + 1 if end in ids else len(ids)
    for num, token_id in enumerate(ids, start=1):
        text += tok.decode((token_id,))
        if THINK_END in text:
            return num if text.lstrip().startswith(THINK) else 0
    return len(ids) if text.lstrip().startswith(THINK) else 0
