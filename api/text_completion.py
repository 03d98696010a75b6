"""Text completions on the wire: the whole body, and the chunks of a stream."""

from __future__ import annotations

import json
from functools import cached_property

from m1serve.api.choice import ChoiceStream
from m1serve.api.chunks import DONE, sse
from m1serve.api.exchange import Exchange
from m1serve.api.exchange_batch import ExchangeBatch
from m1serve.api.schema import CompletionRequest
from m1serve.api.text_logprobs import Lists, TextLogprobs, joined
from m1serve.chat.reply import ContentText, ReplyEvent

_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def text_completion_body(batch: ExchangeBatch) -> bytes:
    choices = [text.whole() for text in _text_choices(batch)]
    return _to_json(_head(batch) | {"choices": choices, "usage": batch.usage()}).encode()


class TextChunkWriter:
    """One for a response; an echoed prompt is each choice's first chunk."""

    def __init__(self, batch: ExchangeBatch) -> None:
        self._batch = batch
        self._choices = {text.turn_id: text for text in _text_choices(batch)}
        self._unopened = list(batch.exchanges)

    def started(self) -> bytes:
        """Of every prompt that the engine has begun since the last call."""
        begun = [exchange for exchange in self._unopened if exchange.started is not None]
        self._unopened = [exchange for exchange in self._unopened if exchange.started is None]
        opened = [self._choices[choice.turn_id] for e in begun for choice in e.choices]
        return b"".join(self._chunk(choice.opening()) for choice in opened if choice.has_opening)

    def step(self, choice: ChoiceStream, events: list[ReplyEvent]) -> bytes:
        text = self._choices[choice.turn_id]
        chunks = [self._chunk(text.piece(e.text)) for e in events if isinstance(e, ContentText)]
        if choice.stop is not None:
            chunks.append(self._chunk(text.piece("") | text.ending()))
        return b"".join(chunks)

    def end(self) -> bytes:
        if not self._batch.prepared.wants_usage_chunk:
            return DONE
        return sse(_head(self._batch) | {"choices": [], "usage": self._batch.usage()}) + DONE

    def _chunk(self, choice: dict[str, object]) -> bytes:
        value = _head(self._batch) | {"choices": [choice]}
        if self._batch.prepared.wants_usage_chunk:
            value["usage"] = None
        return sse(value)


class _Prompt:
    """Of all choices of an exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    @cached_property
    def echo(self) -> str:
        """'' when it is not asked for. A million tokens take a while, so once and when needed."""
        prepared = self._exchange.prepared
        assert isinstance(prepared.body, CompletionRequest)
        ids = prepared.generate.prompt_ids if prepared.body.echo else ()
        return self._exchange.serving.tokenizer.decode(ids)


class _TextChoice:
    """What of one choice is on the wire already."""

    def __init__(
        self, exchange: Exchange, choice: ChoiceStream, place: int, prompt: _Prompt
    ) -> None:
        body = exchange.prepared.body
        assert isinstance(body, CompletionRequest)
        self._exchange, self._choice, self._place, self._body = exchange, choice, place, body
        tok, has_top = exchange.serving.tokenizer, body.num_top_logprobs > 0
        self._logprobs = TextLogprobs(tok, has_top=has_top)
        self._prompt = prompt
        self._num_sent = 0

    @property
    def turn_id(self) -> str:
        return self._choice.turn_id

    def _prompt_ids(self) -> dict[str, object]:
        """Told once a prompt, by its first choice."""
        if not self._body.return_token_ids or self._choice.index > 0:
            return {}
        return {"prompt_token_ids": self._exchange.prepared.generate.prompt_ids}

    @property
    def has_opening(self) -> bool:
        return bool(self._body.echo or self._body.return_token_ids)

    def opening(self) -> dict[str, object]:
        return self._value(self._prompt.echo, self._prompt_logprobs()) | self._prompt_ids()

    def piece(self, text: str) -> dict[str, object]:
        """`text` and the tokens that were not told yet."""
        start, self._num_sent = self._num_sent, len(self._choice.token_ids)
        value = self._value(text, self._answer_logprobs(start) if self._num_sent > start else None)
        if self._body.return_token_ids:
            value["token_ids"] = self._choice.token_ids[start:]
        return value

    def whole(self) -> dict[str, object]:
        before = self._prompt_logprobs()
        logprobs = self._answer_logprobs(0)
        if before is not None and logprobs is not None:
            logprobs = joined(before, logprobs)
        value = self._value(self._prompt.echo + self._choice.message.content, logprobs)
        if self._body.return_token_ids:
            value |= self._prompt_ids()
            value["token_ids"] = self._choice.token_ids
        return value | self.ending()

    def ending(self) -> dict[str, object]:
        """Why the choice stopped, which only its last chunk and its whole body say."""
        return {"finish_reason": self._choice.finish_reason, "stop_cause": self._choice.stop}

    def _value(self, text: str, logprobs: Lists | None) -> dict[str, object]:
        return {"index": self._place, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _prompt_logprobs(self) -> Lists | None:
        started = self._exchange.started
        if not self._body.scores_prompt or started is None:
            return None
        ids = self._exchange.prepared.generate.prompt_ids
        return self._logprobs.of_prompt(
            ids, started.prompt_logprobs or (), started.prompt_top_logprobs or ()
        )

    def _answer_logprobs(self, start: int) -> Lists | None:
        """With the end-of-sentence, so that there are as many as completion tokens."""
        if not self._body.shows_logprobs:
            return None
        choice = self._choice
        return self._logprobs.of_answer(
            choice.token_ids[start:], choice.logprobs[start:], choice.top_logprobs[start:]
        )


def _text_choices(batch: ExchangeBatch) -> list[_TextChoice]:
    """All n of the first prompt, then of the second, and so on."""
    texts: list[_TextChoice] = []
    for exchange in batch.exchanges:
        prompt = _Prompt(exchange)
        for choice in exchange.choices:
            texts.append(_TextChoice(exchange, choice, len(texts), prompt))
    return texts


def _head(batch: ExchangeBatch) -> dict[str, object]:
    prepared = batch.prepared
    return {
        "id": f"cmpl-{prepared.generate.id}",
        "object": "text_completion",
        "created": int(prepared.created_at),
        "model": prepared.body.model,
        "system_fingerprint": batch.weights_version,
    }
