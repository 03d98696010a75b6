"""Texts encoded in parts give the ids of the whole, for each pre-tokeniser that is known."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from m1serve.chat import cutting
from m1serve.chat.cutting import cut, cuts_of

NANO = Path(__file__).parents[2] / "m1serve" / "model" / "nano" / "tokenizer.json"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())

NASTY = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\r", "\t", "\u00a0", "\u3000", "\u2028"),
                *("a", "Zz", "word", "it's", "I'LL", "'s", "'S", "'", "''re", "_", "a_b", "x."),
                *("1", "12", "1234567", "\u0663", "\u00bd", "\u2167", "0x1F"),
                *(".", ",", "...", "?!", "{", '"}', '": "', "://", "//\n", ";\r\n", ")\n\n  "),
                *("é", "e\u0301", "ß", "Я", "\u4f60\u597d", "\u3002", "\uff0c", "\u30ab", "\uac00"),
                *("\U0001f642", "\U0001f468\u200d\U0001f469", "\u200b", "\ufeff", "\x00", "\u017f"),
                *("<think>", "<end_of_sentence>", "def f(x):\n    return x\n"),
            ]
        ),
        st.text(max_size=4),
    ),
    min_size=6,
    max_size=40,
).map("".join)


def pre_tokenizer(pattern: str) -> pre_tokenizers.PreTokenizer:
    if pattern == cutting._GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def greedy_tokenizer(pattern: str) -> Tokenizer:
    """Merges nearly every pair of printable ASCII, so that a moved boundary changes the ids."""
    vocab = {char: place for place, char in enumerate(ALPHABET)}
    merges: list[tuple[str, str]] = []
    common = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ", "č"]
    for first in common:
        for second in common:
            merges.append((first, second))
            vocab.setdefault(first + second, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizer(pattern)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZERS = [greedy_tokenizer(pattern) for pattern in cutting._CUTS_OF]


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("place", range(len(TOKENIZERS)))
@settings(max_examples=80, deadline=None)
@given(text=NASTY, size=st.integers(1, 9))
def test_parts_give_the_ids_of_the_whole(place: int, text: str, size: int) -> None:
    tokenizer = TOKENIZERS[place]
    cuts = cuts_of(json.loads(tokenizer.to_str()))
    assert cuts is not None
    parts = cut(text, cuts, size)
    assert "".join(parts) == text
    whole = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    apart = [piece for part in parts for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(part)]
    assert apart == whole
    assert [i for part in parts for i in ids(tokenizer, part)] == ids(tokenizer, text)


@pytest.mark.parametrize("place", range(len(TOKENIZERS)))
def test_ordinary_text_is_cut_into_parts_of_the_size_asked_for(place: int) -> None:
    cuts = cuts_of(json.loads(TOKENIZERS[place].to_str()))
    parts = cut("Some words, and 12 numbers.\n" * 100, cuts, 50)
    assert len(parts) > 40
    assert all(50 <= len(part) < 70 for part in parts[:-1])


def test_nanos_own_tokenizer_is_cut() -> None:
    assert cuts_of(json.loads(NANO.read_text(encoding="utf-8"))) is not None


def test_what_is_not_known_is_not_cut() -> None:
    known = json.loads(TOKENIZERS[0].to_str())
    for change in (
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {**known["pre_tokenizer"], "add_prefix_space": True}},
        {"model": {**known["model"], "dropout": 0.1}},
    ):
        assert cuts_of({**known, **change}) is None
    other = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    other.pre_tokenizer = pre_tokenizer(r"\S+|\s+")
    assert cuts_of(json.loads(other.to_str())) is None
    assert cut("a b " * 100, None, 10) == ("a b " * 100,)


def test_a_text_without_a_safe_place_stays_whole() -> None:
    assert cut("a" * 100, re.compile("a(?= )"), 10) == ["a" * 100]
