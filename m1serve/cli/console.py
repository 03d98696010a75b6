"""Where commands print: as wide as the terminal, and wide enough for a table when there is none."""

from __future__ import annotations

from rich.console import Console

PIPED_WIDTH = 160


def wide_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)
