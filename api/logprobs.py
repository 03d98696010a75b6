"""OpenAI's logprob entries. Pure."""

from __future__ import annotations

from m1serve.api.choice import ChoiceStream
from m1serve.chat.tokenizer import ChatTokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def logprob_entries(
    tok: ChatTokenizer, choice: ChoiceStream, start: int, end: int
) -> list[dict[str, object]]:
    """Of tokens [start, end); the end-of-sentence has none, as in OpenAI's answers."""
    entries: list[dict[str, object]] = []
    for place in range(start, min(end, choice.num_shown)):
        entry = _entry(tok, choice.token_ids[place], choice.logprobs[place])
        row = choice.top_logprobs[place] if place < len(choice.top_logprobs) else ()
        entry["top_logprobs"] = [_entry(tok, top.token_id, top.logprob) for top in row]
        entries.append(entry)
    return entries


def _entry(tok: ChatTokenizer, token_id: int, logprob: float) -> dict[str, object]:
    raw = tok.token_bytes(token_id)
    return {
        "token": raw.decode("utf-8", "replace"),
        "logprob": max(logprob, LOWEST),
        "bytes": list(raw),
    }
