"""What a ScriptedEngine says: replies from JSON lines, and logprobs made up for them.

A line is {"text": ...} with, if wanted, "when" (plays only for prompts that contain it), "turn"
(plays only after this many assistant turns) and the other fields of ScriptedReply.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from m1serve.chat.tokenizer import BOS, ChatTokenizer
from m1serve.errors import ConfigError
from m1serve.types import GenerateRequest, TopLogprob

_ASSISTANT = b"ai name="
"""How the template begins an assistant's sentence, the open one at the prompt's end included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedReply:
    text: str = ""
    """Everything the model writes, markup included; the end-of-sentence token follows by itself."""
    more_texts: tuple[str, ...] = ()
    """Of the choices after the first, over and over."""
    delay_s: float = 0.0
    """Before the first token."""
    step_s: float = 0.0
    """After every token."""
    fails_after: int | None = None
    """Tokens after which every choice ends with StopCause.ERROR."""
    cached_tokens: int = 0

    def text_of(self, choice: int) -> str:
        texts = (self.text, *self.more_texts)
        return texts[choice % len(texts)]


Replies = Callable[[GenerateRequest], ScriptedReply]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    when: str | None
    turn: int | None
    reply: ScriptedReply


def replies_from_file(file: Path, tokenizer: ChatTokenizer) -> Replies:
    """The first line whose `when` is in the prompt and whose `turn` it is; else the next of those
    that have neither, in a circle."""
    lines = list(_parse(file))
    anywhere = [line.reply for line in lines if line.when is None and line.turn is None]
    if not anywhere:
        raise ConfigError(
            f"{file} has no line without 'when' and 'turn'; add one for all other prompts"
        )
    in_turn = itertools.cycle(anywhere)
    cues = _Cues([line for line in lines if line.when is not None or line.turn is not None])

    def reply(request: GenerateRequest) -> ScriptedReply:
        turn = assistant_turns(tokenizer, request.prompt_ids)
        return cues.find(tokenizer.decode(request.prompt_ids), turn) or next(in_turn)

    return reply


def assistant_turns(tokenizer: ChatTokenizer, prompt_ids: Sequence[int]) -> int:
    """How many turns of the assistant the prompt holds, without the one that is to be generated."""
    bos = tokenizer.control_ids[BOS]
    starts = [i + 1 for i, token_id in enumerate(prompt_ids) if token_id == bos]
    # a token is at least one byte, so these ids hold the whole head
    heads = [prompt_ids[i : i + len(_ASSISTANT)] for i in starts]
    is_assistant = [
        b"".join(map(tokenizer.token_bytes, head)).startswith(_ASSISTANT) for head in heads
    ]
    return max(0, sum(is_assistant) - (1 if is_assistant[-1:] == [True] else 0))


def made_up_logprob(before: int, token_id: int) -> float:
    """In (-2, 0), always the same for a pair, so that scoring agrees with generation.

    A token after itself has probability 0.999: what repeats itself is sure of it, as a model is.
    """
    if before == token_id:
        return -0.001
    return -0.001 - (zlib.crc32(f"{before} {token_id}".encode()) % 1999) / 1000


def made_up_top(token_id: int, logprob: float, count: int) -> tuple[TopLogprob, ...]:
    """The token itself and then its neighbours by id, each less likely."""
    return tuple(TopLogprob(token_id=token_id + i, logprob=logprob - i) for i in range(count))


class _Cues:
    """Lines by what makes them play, so that a script of thousands costs no more than its prompt.

    A `when` with a word between two others can only be in a prompt that has this word.
    """

    def __init__(self, lines: Sequence[_Line]) -> None:
        self._lines = lines
        self._places: dict[str, dict[int | None, int]] = {}
        """By `when` ("" for none) and turn: the first such line."""
        for place, line in enumerate(lines):
            self._places.setdefault(line.when or "", {}).setdefault(line.turn, place)
        num_whens = Counter(word for when in self._places for word in _inner_words(when))
        self._by_word: dict[str, list[str]] = {}
        self._wordless: list[str] = []
        for when in self._places:
            words = _inner_words(when)
            if words:
                self._by_word.setdefault(min(words, key=num_whens.__getitem__), []).append(when)
            else:
                self._wordless.append(when)

    def find(self, prompt: str, turn: int) -> ScriptedReply | None:
        words = set(prompt.split())
        likely = [when for word in self._by_word.keys() & words for when in self._by_word[word]]
        places = [
            place
            for when in (*likely, *self._wordless)
            if when in prompt
            for key in (turn, None)
            if (place := self._places[when].get(key)) is not None
        ]
        return self._lines[min(places)].reply if places else None


def _inner_words(text: str) -> set[str]:
    """Words with white space on both sides of them."""
    words = text.split()
    first = 0 if text[:1].isspace() else 1
    last = len(words) if text[-1:].isspace() else len(words) - 1
    return set(words[first:last])


def _parse(file: Path) -> Iterator[_Line]:
    if not file.is_file():
        raise ConfigError(f"no script at {file}; set engine.script to a file of JSON lines")
    with file.open(encoding="utf-8") as lines:
        for number, text in enumerate(lines, start=1):
            if text.strip():
                yield _parse_line(text, f"{file}:{number}")


def _parse_line(text: str, where: str) -> _Line:
    known = {field.name for field in fields(ScriptedReply)}
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(raw, dict) or "text" not in raw or raw.keys() - known - {"when", "turn"}:
        raise ConfigError(
            f"{where}: wanted an object with 'text' and of {sorted(known)}, 'when' or 'turn', "
            f"got {text[:80].strip()}"
        )
    when, turn = raw.pop("when", None), raw.pop("turn", None)
    if when is not None and (not isinstance(when, str) or not when):
        raise ConfigError(f"{where}: 'when' must be text to look for, got {when!r}")
    if turn is not None and (not isinstance(turn, int) or isinstance(turn, bool) or turn < 0):
        raise ConfigError(f"{where}: 'turn' must be a number of assistant turns, got {turn!r}")
    raw["more_texts"] = tuple(raw.get("more_texts", ()))
    return _Line(when=when, turn=turn, reply=ScriptedReply(**raw))
