"""Trains a byte-level BPE as M1's: words apart from punctuation, every digit a token of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from m1serve.chat.tokenizer import CONTROL, TAGS, ChatTokenizer

_PIECES = r" ?[A-Za-z_]+|[0-9]|[^A-Za-z0-9]+?(?= [A-Za-z])|[^A-Za-z0-9]+"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """`vocab_size` counts the control tokens and the tags, which are single ids."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    # merges across a tag could never be used: the tag is cut out first
    marks = "|".join(re.escape(mark) for mark in (*CONTROL, *TAGS))
    between_tags = (part for text in texts for part in re.split(marks, text))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(between_tags, trainer)
    # not "special": they must survive decoding
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def bare_tokenizer() -> ChatTokenizer:
    """Bytes, control tokens and tags, no merges."""
    return ChatTokenizer(train_tokenizer((), 256 + len(CONTROL) + len(TAGS)).to_str())


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
