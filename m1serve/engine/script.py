"""What a ScriptedEngine says: replies from JSON lines, and logprobs made up for them.

A line is {"text": ...} with, if wanted, "when" (plays only for prompts that contain it) and the
other fields of ScriptedReply.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.errors import ConfigError
from m1serve.types import GenerateRequest, TopLogprob


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
    reply: ScriptedReply


def replies_from_file(file: Path, tokenizer: ChatTokenizer) -> Replies:
    """The first line whose `when` is in the prompt; else the next of those without, in a circle."""
    lines = list(_parse(file))
    anywhere = [line.reply for line in lines if line.when is None]
    if not anywhere:
        raise ConfigError(f"{file} has no line without 'when'; add one for all other prompts")
    in_turn = itertools.cycle(anywhere)

    def reply(request: GenerateRequest) -> ScriptedReply:
        prompt = tokenizer.decode(request.prompt_ids)
        for line in lines:
            if line.when is not None and line.when in prompt:
                return line.reply
        return next(in_turn)

    return reply


def made_up_logprob(before: int, token_id: int) -> float:
    """In (-2, 0), always the same for a pair, so that scoring agrees with generation."""
    return -0.001 - (zlib.crc32(f"{before} {token_id}".encode()) % 1999) / 1000


def made_up_top(token_id: int, logprob: float, count: int) -> tuple[TopLogprob, ...]:
    """The token itself and then its neighbours by id, each less likely."""
    return tuple(TopLogprob(token_id=token_id + i, logprob=logprob - i) for i in range(count))


def _parse(file: Path) -> Iterator[_Line]:
    if not file.is_file():
        raise ConfigError(f"no script at {file}; set engine.script to a file of JSON lines")
    known = {field.name for field in fields(ScriptedReply)}
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not text.strip():
            continue
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{file}:{number} is not JSON: {error}") from None
        if not isinstance(raw, dict) or "text" not in raw or raw.keys() - known - {"when"}:
            raise ConfigError(
                f"{file}:{number}: wanted an object with 'text' and of {sorted(known)} or 'when', "
                f"got {text[:80]}"
            )
        when = raw.pop("when", None)
        raw["more_texts"] = tuple(raw.get("more_texts", ()))
        yield _Line(when=when, reply=ScriptedReply(**raw))
