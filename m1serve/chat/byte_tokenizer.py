"""A tokenizer without a model: one id a byte, then M1's control tokens and tags; for tests."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from m1serve.chat.tokenizer import CONTROL, TAGS, ChatTokenizer


def byte_tokenizer(*, tags: Sequence[str] = TAGS) -> ChatTokenizer:
    """Tags that are left out are spelled byte by byte, as a tokenizer without them has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: place for place, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in CONTROL])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in tags])
    return ChatTokenizer(tokenizer.to_str(), source="byte_tokenizer")
