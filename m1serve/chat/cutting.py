"""Where a text may be cut so that its parts, encoded apart, give exactly the tokens of the whole.

Proved for pre-tokenisers known by their pattern; any other tokenizer gets its texts whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# Why these cuts are safe. A cut lies behind a character X and before a separator S.
# 1. Patterns match from left to right without looking back, so what follows a boundary of the
#    whole is matched as if the text began there.
# 2. In every pattern below, an alternative that can consume X ends behind it unless more of X's
#    kind (or, in GPT-4o's, an apostrophe) follows: no match crosses from X to S, so X|S is always
#    a boundary. The end of a part ends that run in the same way as S does.
# 3. The look-aheads, (?!\S) and (?= [A-Za-z]), follow whitespace or runs without letters and
#    digits. A match before X ends before X, and what it looks at is X or lies before it.
_SEPARATOR = r"[ \n,.;:!?)\]}\"]"
_LETTER_OR_DIGIT = (
    r"[0-9A-Za-z\u0410-\u044f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3]"
    rf"(?={_SEPARATOR[:-1]}\u3001\u3002\uff01\uff0c\uff1f])"
)
"""Letters and punctuation that are such in every version of Unicode a regex engine may know."""
_ASCII_LETTER_OR_DIGIT = rf"[0-9A-Za-z](?={_SEPARATOR})"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT4O_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_GPT4O_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CUTS_OF = {
    _GPT2: _LETTER_OR_DIGIT,
    # GPT-4, Llama 3
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}": _LETTER_OR_DIGIT,
    # Qwen 2
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}": _LETTER_OR_DIGIT,
    # GPT-4o
    rf"[^\r\n\p{{L}}\p{{N}}]?{_GPT4O_UPPER}*{_GPT4O_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_GPT4O_UPPER}+{_GPT4O_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": _LETTER_OR_DIGIT,
    # nano: everything but ASCII letters and digits runs together
    r" ?[A-Za-z_]+|[0-9]|[^A-Za-z0-9]+?(?= [A-Za-z])|[^A-Za-z0-9]+": _ASCII_LETTER_OR_DIGIT,
}


def cuts_of(tokenizer: Mapping[str, object]) -> re.Pattern[str] | None:
    """Matches end at places where cutting is safe; None where nothing is known. `tokenizer` is
    the parsed tokenizer.json.
    """
    model = tokenizer.get("model")
    is_plain = isinstance(model, dict) and not model.get("dropout")
    if not is_plain or tokenizer.get("normalizer") is not None:
        return None
    pattern = _CUTS_OF.get(_split_pattern(tokenizer.get("pre_tokenizer")) or "")
    return re.compile(pattern) if pattern else None


def cut(text: str, cuts: re.Pattern[str] | None, size: int) -> Sequence[str]:
    """Parts of at least `size` characters (the last may be shorter), as short as `cuts` allows."""
    if cuts is None:
        return (text,)
    parts: list[str] = []
    begin = 0
    while len(text) - begin > size:
        found = cuts.search(text, begin + size - 1)
        if found is None:
            break
        parts.append(text[begin : found.end()])
        begin = found.end()
    parts.append(text[begin:])
    return parts


def _split_pattern(pre_tokenizer: object) -> str | None:
    """The one regex that pieces are split by, or None when it is not as simple as that."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": str(pattern)},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
        case _:
            return None
