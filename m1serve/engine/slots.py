"""SlotPool: the rows in which sequences of one weights version live, grown as they are needed."""

# R rows, E hidden

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m1serve.model.config import M1Config
from m1serve.model.state import SequenceState

FIRST_ROWS = 8
FIRST_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSnapshot:
    """What a row held after some tokens: enough to go on from there in any row."""

    state: SequenceState
    last_E: Tensor
    """The hidden state that predicts the next token."""

    @property
    def num_bytes(self) -> int:
        return self.state.num_bytes + self.last_E.numel() * self.last_E.element_size()


class SlotPool:
    """State and last hidden state of each row; doubles in rows and in tokens, up to its limits.

    Owned by the step thread. Which row belongs to whom is the batch's business.
    """

    def __init__(
        self, config: M1Config, *, max_rows: int, max_tokens: int, device: str, dtype: torch.dtype
    ) -> None:
        self._config, self._device, self._dtype = config, device, dtype
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._allocate(min(FIRST_ROWS, max_rows), min(FIRST_TOKENS, max_tokens))

    @property
    def num_rows(self) -> int:
        return self.state.num_rows

    @property
    def num_tokens(self) -> int:
        """What one row can hold at present."""
        return self._num_tokens

    @property
    def num_bytes(self) -> int:
        return self.state.num_bytes

    def ensure(self, *, rows: int, tokens: int) -> None:
        """Makes room for `rows` rows of `tokens` tokens; what rows hold stays as it is."""
        if rows <= self.num_rows and tokens <= self._num_tokens:
            return
        assert rows <= self._max_rows, f"{rows} rows, limit {self._max_rows}"
        assert tokens <= self._max_tokens, f"{tokens} tokens, limit {self._max_tokens}"
        old_state, old_last_RE = self.state, self.last_RE
        self._allocate(
            _grown(self.num_rows, rows, self._max_rows),
            _grown(self._num_tokens, tokens, self._max_tokens),
        )
        kept = torch.arange(old_state.num_rows, device=self._device)
        self.state.write(kept, old_state)
        self.last_RE[: len(kept)] = old_last_RE

    def clear(self, row: int) -> None:
        """A row's next owner starts from nothing."""
        self.state.zero_row(row)
        self.last_RE[row].zero_()

    def move(self, source: int, target: int) -> None:
        self.state.move_row(source, target)
        self.last_RE[target] = self.last_RE[source]

    def snapshot(self, row: int) -> RowSnapshot:
        return RowSnapshot(state=self.state.snapshot(row), last_E=self.last_RE[row].clone())

    def restore(self, row: int, snapshot: RowSnapshot) -> None:
        self.state.restore(row, snapshot.state)
        self.last_RE[row] = snapshot.last_E

    def _allocate(self, num_rows: int, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self.state = SequenceState.allocate(
            self._config, num_rows, num_tokens, device=self._device, dtype=self._dtype
        )
        self.last_RE = torch.zeros(num_rows, self._config.hidden_size, device=self._device)


def _grown(have: int, wanted: int, limit: int) -> int:
    """The next doubling that is enough."""
    size = have
    while size < wanted:
        size *= 2
    return min(size, limit)
