"""From the step thread to asyncio: items are gathered during a step and cross once, at its end."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from m1serve.types import Delta, Started

logger = logging.getLogger(__name__)

Item = Started | Delta | Exception


@dataclass(slots=True, eq=False)
class Outlet:
    """The stream of one request: `put` on the step thread, read `queue` on its own event loop."""

    outbox: Outbox
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Item] = field(default_factory=asyncio.Queue)

    def put(self, item: Item) -> None:
        self.outbox.add(self, item)


class Outbox:
    """Used by the step thread only."""

    def __init__(self) -> None:
        self._items: list[tuple[Outlet, Item]] = []

    def add(self, outlet: Outlet, item: Item) -> None:
        self._items.append((outlet, item))

    def flush(self) -> None:
        """One wake-up for each event loop that has something to read."""
        if not self._items:
            return
        items, self._items = self._items, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Outlet, Item]]] = {}
        for entry in items:
            by_loop.setdefault(entry[0].loop, []).append(entry)
        for loop, entries in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, entries)
            except RuntimeError:
                # the loop was closed with streams open: nobody is left to read them
                logger.warning("dropped %d items for a closed event loop", len(entries))


def _deliver(entries: list[tuple[Outlet, Item]]) -> None:
    for outlet, item in entries:
        outlet.queue.put_nowait(item)
