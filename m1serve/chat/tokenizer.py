"""M1's byte-level BPE in two copies: one knows the control tokens, one cannot produce them.

User text goes through the second, so no text a client sends becomes a control token or a tag.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer

from m1serve.chat.cutting import cut, cuts_of
from m1serve.errors import ConfigError, RequestError

BOD = "<begin_of_document>"
BOS = "<beginning_of_sentence>"
EOS = "<end_of_sentence>"
EOD = "<end_of_document>"
CONTROL = (BOD, BOS, EOS, EOD)
THINK, THINK_END = "<think>", "</think>"
CALLS, CALLS_END = "<tool_calls>", "</tool_calls>"
TAGS = (THINK, THINK_END, CALLS, CALLS_END)

_FETCH = "fetch the tokenizer.json that belongs to the model"
_CACHED_CHARS = 32_768
"""Longer texts are encoded each time; shorter ones (system prompts, tool lists) are remembered."""
_PART_CHARS = 16_384
"""Longer texts are cut into parts of about this many characters, encoded on all cores at once."""


class ChatTokenizer:
    """Load it with `ChatTokenizer.load`. Safe to share between threads."""

    def __init__(self, tokenizer_json: str, *, source: str = "tokenizer.json") -> None:
        raw = _json_object(tokenizer_json, source)
        _require_byte_level(raw, source)
        self._json = tokenizer_json
        self.digest = hashlib.sha256(tokenizer_json.encode()).hexdigest()
        self._control = _built(tokenizer_json, source)
        self._text = _built(json.dumps(_without_added_tokens(raw)), source)
        self._cuts = cuts_of(raw)
        self._bytes_of = _token_bytes(self._control, raw, source)
        self.vocab_size = len(self._bytes_of)
        self.control_ids: dict[str, int] = {
            name: token_id
            for name in (*CONTROL, *TAGS)
            if (token_id := self._control.token_to_id(name)) is not None
        }
        """Tags may be missing: a tokenizer may spell them with several tokens."""
        missing = [name for name in CONTROL if name not in self.control_ids]
        if missing:
            raise ConfigError(f"{source} has no tokens {missing}; m1serve needs M1's tokenizer")
        self.eos_id = self.control_ids[EOS]
        self._encode_cached = lru_cache(maxsize=256)(self._encode_text)

    @classmethod
    def load(cls, path: Path | str) -> ChatTokenizer:
        """`path` is a tokenizer.json or a directory that holds one."""
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise ConfigError(f"no tokenizer at {file}; wanted a directory with tokenizer.json")
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file} is no JSON object ({error}); {_FETCH}") from error
        return cls(text, source=str(file))

    def encode_control(self, text: str) -> list[int]:
        """Our own text: control tokens and tags in it become their ids."""
        return list(self._control.encode(text, add_special_tokens=False).ids)

    def encode_text(self, text: str) -> list[int]:
        """Anybody's text: whatever it says, it becomes ordinary tokens. Other threads run on."""
        if len(text) <= _CACHED_CHARS:
            return list(self._encode_cached(text))
        return list(self._encode_text(text))

    def decode(self, ids: Iterable[int]) -> str:
        """Control tokens and tags are kept; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self._bytes_of.__getitem__, ids)).decode("utf-8", "replace")

    def to_json(self) -> str:
        """The tokenizer.json it was made from."""
        return self._json

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes_of[token_id]

    def _encode_text(self, text: str) -> tuple[int, ...]:
        parts = cut(text, self._cuts, _PART_CHARS)
        try:
            # the plain `encode` holds the GIL and counts characters: three times the work
            encodings = self._text.encode_batch_fast(parts, add_special_tokens=False)
        except TypeError:
            raise RequestError(
                "text is not valid Unicode: it holds a lone surrogate (U+D800 to U+DFFF); "
                "send well-formed UTF-8",
                code="invalid_unicode",
            ) from None
        return tuple(chain.from_iterable(encoding.ids for encoding in encodings))


class Detokenizer:
    """Ids to text as they come; never emits half a character."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, ids)))

    def flush(self) -> str:
        """The last bytes of a stream that ended inside a character."""
        return self._decoder.decode(b"", True)


def _json_object(text: str, source: str) -> dict[str, object]:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is no JSON object ({error}); {_FETCH}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{source} is no JSON object but a {type(raw).__name__}; {_FETCH}")
    return raw


def _built(tokenizer_json: str, source: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(tokenizer_json)
    except Exception as error:
        # tokenizers raises nothing narrower
        raise ConfigError(f"{source} cannot be used: {error}; {_FETCH}") from error


def _require_byte_level(raw: dict[str, object], source: str) -> None:
    model, decoder = raw.get("model"), raw.get("decoder")
    is_bpe = isinstance(model, dict) and model.get("type") == "BPE"
    is_byte_level = isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"
    if not (is_bpe and is_byte_level):
        raise ConfigError(f"{source} is not a byte-level BPE; m1serve reads M1's tokenizer only")


def _without_added_tokens(raw: dict[str, object]) -> dict[str, object]:
    """Nor in the BPE vocabulary, where a whole-word lookup could find a control token."""
    added = {str(token["content"]) for token in _list(raw.get("added_tokens"))}
    model = dict(raw["model"])  # type: ignore[call-overload]
    model["vocab"] = {k: v for k, v in model["vocab"].items() if k not in added}
    return {**raw, "added_tokens": [], "post_processor": None, "model": model}


def _list(value: object) -> list[dict[str, object]]:
    return value if isinstance(value, list) else []


def _token_bytes(tokenizer: Tokenizer, raw: dict[str, object], source: str) -> list[bytes]:
    added = {str(token["content"]) for token in _list(raw.get("added_tokens"))}
    byte_of = _byte_of_char()
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values()) + 1)
    for token, token_id in vocab.items():
        if token in added:
            table[token_id] = token.encode()
            continue
        try:
            table[token_id] = bytes(byte_of[char] for char in token)
        except KeyError as error:
            raise ConfigError(
                f"{source} has the token {token!r}, which spells no bytes: it is not a byte-level "
                f"BPE; {_FETCH}"
            ) from error
    return table


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, reversed."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
