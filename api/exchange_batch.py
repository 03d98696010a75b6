"""Several exchanges that answer one request together: the prompts of a text completion."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import anyio

from m1serve.api.exchange import Exchange, Step
from m1serve.types import Started

_Item = Started | Step
_Steps = AsyncGenerator[_Item, None]


class ExchangeBatch:
    """Used like one Exchange; at least one is in it. All of them run side by side."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self.exchanges = tuple(exchanges)
        first = self.exchanges[0]
        self.serving, self.prepared = first.serving, first.prepared
        self.choices = [choice for exchange in self.exchanges for choice in exchange.choices]
        self._is_kept = False

    @property
    def session_id(self) -> str:
        """Prompts without a session named are one each: all of them, with commas."""
        return ",".join(dict.fromkeys(exchange.session_id for exchange in self.exchanges))

    @property
    def weights_version(self) -> str:
        return self.exchanges[-1].weights_version

    @property
    def has_ended(self) -> bool:
        return all(exchange.has_ended for exchange in self.exchanges)

    @property
    def num_shown_logprobs(self) -> int:
        shown = sum(exchange.num_shown_logprobs for exchange in self.exchanges)
        if self.prepared.generate.prompt_logprobs:
            shown += sum(len(e.prepared.generate.prompt_ids) for e in self.exchanges)
        return shown

    @property
    def num_shown_prompt(self) -> int:
        return sum(exchange.num_shown_prompt for exchange in self.exchanges)

    @property
    def is_client_gone(self) -> bool:
        return self.exchanges[0].is_client_gone

    @is_client_gone.setter
    def is_client_gone(self, is_gone: bool) -> None:
        for exchange in self.exchanges:
            exchange.is_client_gone = is_gone

    async def steps(self) -> _Steps:
        """One step at a time of each: whoever reads a step sees its choice as it was then."""
        streams = [exchange.steps() for exchange in self.exchanges]
        pending = {asyncio.create_task(_next(stream)): stream for stream in streams}
        try:
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    stream = pending.pop(task)
                    item = task.result()
                    if item is not None:
                        yield item
                        pending[asyncio.create_task(_next(stream))] = stream
        finally:
            with anyio.CancelScope(shield=True):
                await _close(streams, pending)

    async def abort(self) -> None:
        for exchange in self.exchanges:
            await exchange.abort()

    async def keep(self) -> None:
        """Once: several exchanges may have ended before the step of the first is read."""
        if not self._is_kept:
            self._is_kept = True
            for exchange in self.exchanges:
                await exchange.keep()

    def settle(self, *, was_delivered: bool) -> None:
        for exchange in self.exchanges:
            exchange.settle(was_delivered=was_delivered)

    def usage(self) -> dict[str, object]:
        return _sum([exchange.usage() for exchange in self.exchanges])


async def _next(stream: _Steps) -> _Item | None:
    return await anext(stream, None)


async def _close(
    streams: Sequence[_Steps], pending: dict[asyncio.Task[_Item | None], _Steps]
) -> None:
    for task in pending:
        task.cancel()
    # what they raise is not told: the request is over for another reason
    await asyncio.gather(*pending, return_exceptions=True)
    for stream in streams:
        await stream.aclose()


def _sum(usages: Sequence[dict[str, object]]) -> dict[str, object]:
    """Numbers add up, tables go entry by entry."""
    total: dict[str, object] = {}
    for name, value in usages[0].items():
        values = [usage[name] for usage in usages]
        if isinstance(value, dict):
            total[name] = _sum([table for table in values if isinstance(table, dict)])
        else:
            total[name] = sum(number for number in values if isinstance(number, int))
    return total
