"""A reply that is only text: what `/v1/completions` returns. No tags, no calls, nothing is cut."""

from __future__ import annotations

from m1serve.chat.reply_draft import ParsedReply, ReplyDraft, ReplyEvent


class RawReply:
    """Pushed and finished like a ReplyParser."""

    has_broken_call = False

    def __init__(self) -> None:
        self._draft = ReplyDraft()

    def push(self, text: str) -> list[ReplyEvent]:
        self._draft.say(text)
        return self._draft.take_events()

    def finish(self) -> list[ReplyEvent]:
        return self._draft.take_events()

    def parsed(self) -> ParsedReply:
        return self._draft.parsed()
