"""What one check of `m1serve doctor` found: values, and how they look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.markup import escape

from m1serve.errors import M1ServeError


class Unfit(M1ServeError):
    """What a check found wrong, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    subject: str
    is_good: bool
    text: str
    details: Mapping[str, object] = field(default_factory=dict)
    """The numbers behind the text; for --json"""

    @property
    def line(self) -> str:
        """With rich's markup for the mark alone."""
        mark = "[green]ok   [/green]" if self.is_good else "[red]wrong[/red]"
        return f"{mark} {self.subject}: {escape(self.text)}"
