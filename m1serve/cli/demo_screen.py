"""What the demo shows while it runs: one line a step, a bar below it where there is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Screen:
    def __init__(self, console: Console) -> None:
        self.console = console

    def line(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        with self.console.status(text):
            yield

    @contextmanager
    def counting(self, text: str, total: int) -> Iterator[Callable[[], None]]:
        """Yields what to call for every one that is done."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        # without a terminal it would leave empty lines
        is_shown = self.console.is_terminal
        with Progress(
            *columns, console=self.console, transient=True, disable=not is_shown
        ) as progress:
            task = progress.add_task(text, total=total)
            yield lambda: progress.advance(task)
