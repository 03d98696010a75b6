"""SlotPool: the rows in which sequences of one weights version live."""

# R rows, E hidden, M pages a row

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m1serve.engine.pages import PageAllocator
from m1serve.model.config import M1Config
from m1serve.model.paged import KeyPages, PagedState, Span


@dataclass(slots=True, kw_only=True, eq=False)
class RowSnapshot:
    """What a row held after some tokens: enough to go on from there in any row.

    Its states are copies, its pages are shared. Whoever keeps it lets go of it with `release`.
    """

    lightning: dict[int, Tensor]
    """layer -> [H, D, D]"""
    last_E: Tensor
    """The hidden state that predicts the next token."""
    num_tokens: int
    pages: tuple[int, ...]
    allocator: PageAllocator
    num_holders: int = 1

    @property
    def state_bytes(self) -> int:
        tensors = (*self.lightning.values(), self.last_E)
        return sum(t.numel() * t.element_size() for t in tensors)

    def hold(self) -> RowSnapshot:
        self.num_holders += 1
        return self

    def release(self) -> None:
        self.num_holders -= 1
        assert self.num_holders >= 0, "a snapshot was released once too often"
        if self.num_holders == 0:
            self.allocator.release(self.pages)


class SlotPool:
    """State, last hidden state and pages of each row. Owned by the step thread.

    Which row belongs to whom is the batch's business. A row's last page is written by that row
    alone; a snapshot that shares it looks only at the tokens from before.
    """

    def __init__(
        self,
        config: M1Config,
        *,
        num_rows: int,
        max_tokens: int,
        pages: KeyPages,
        allocator: PageAllocator,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`dtype` is that of hidden states: in the head's own, its product needs no copy of it."""
        H, D = config.num_attention_heads, config.head_dim
        self._allocator, self._pages = allocator, pages
        self._held: list[list[int]] = [[] for _ in range(num_rows)]
        self.last_RE = torch.zeros(num_rows, config.hidden_size, device=device, dtype=dtype)
        self.state = PagedState(
            lightning={
                i: torch.zeros(num_rows, H, D, D, device=device) for i in config.lightning_layers
            },
            keys={},
            values={},
            length_B=torch.zeros(num_rows, dtype=torch.int64, device=device),
            fixed_capacity=True,
            pages=pages,
            page_BM=torch.zeros(
                num_rows, allocator.pages_for(max_tokens), dtype=torch.int32, device=device
            ),
        )

    @property
    def num_rows(self) -> int:
        return len(self._held)

    def reserve(self, row: int, num_tokens: int) -> bool:
        """Pages for so many tokens in all; False, and nothing changed, when there are too few."""
        held = self._held[row]
        missing = self._allocator.pages_for(num_tokens) - len(held)
        if missing <= 0:
            return True
        taken = self._allocator.take(missing)
        if taken is None:
            return False
        self._append(row, taken)
        return True

    def clear(self, row: int) -> None:
        """A row's next owner starts from nothing."""
        self.free(row)
        for t in self.state.lightning.values():
            t[row].zero_()
        self.state.length_B[row] = 0
        self.last_RE[row].zero_()

    def free(self, row: int) -> None:
        """Lets go of a row's pages."""
        self._allocator.release(self._held[row])
        self._held[row] = []

    def move(self, source: int, target: int) -> None:
        """To a row that holds nothing; the source holds nothing afterwards."""
        self._copy_states(source, target)
        self._held[target], self._held[source] = self._held[source], []

    def swap(self, row: int, other: int) -> None:
        kept = {i: t[row].clone() for i, t in self.state.lightning.items()}
        length, last_E = self.state.length_B[row].clone(), self.last_RE[row].clone()
        page_M = self.state.page_BM[row].clone()
        self._copy_states(other, row)
        for i, t in kept.items():
            self.state.lightning[i][other] = t
        self.state.length_B[other], self.last_RE[other] = length, last_E
        self.state.page_BM[other] = page_M
        self._held[row], self._held[other] = self._held[other], self._held[row]

    def snapshot(self, row: int, num_tokens: int) -> RowSnapshot:
        """Of a row that has consumed `num_tokens`."""
        lightning = {i: t[row].clone() for i, t in self.state.lightning.items()}
        last_E = self.last_RE[row].clone()
        # a copy that finds no memory must leave nothing held
        pages = tuple(self._held[row][: self._allocator.pages_for(num_tokens)])
        self._allocator.share(pages)
        return RowSnapshot(
            lightning=lightning,
            last_E=last_E,
            num_tokens=num_tokens,
            pages=pages,
            allocator=self._allocator,
        )

    def restore(self, row: int, snapshot: RowSnapshot) -> bool:
        """Makes a row what it was then; False, and the row holds nothing, when pages are short."""
        # taking a page may drop other snapshots, and would this one
        snapshot.hold()
        try:
            return self._restore(row, snapshot)
        finally:
            snapshot.release()

    def _restore(self, row: int, snapshot: RowSnapshot) -> bool:
        self.free(row)
        num_full = snapshot.num_tokens // self._allocator.page_tokens
        # the row will write behind the snapshot's last token, so it needs that page for itself
        own = self._allocator.take(len(snapshot.pages) - num_full)
        if own is None:
            return False
        full = snapshot.pages[:num_full]
        self._allocator.share(full)
        # the row's from here on, so that whoever sees this fail can free it
        self._append(row, [*full, *own])
        for source, target in zip(snapshot.pages[num_full:], own, strict=True):
            self._pages.copy_page(source, target)
        for i, t in snapshot.lightning.items():
            self.state.lightning[i][row] = t
        self.state.length_B[row] = snapshot.num_tokens
        self.last_RE[row] = snapshot.last_E
        return True

    def decode_view(self, num_rows: int) -> PagedState:
        """The first rows, sharing memory: a forward on it updates the pool."""
        state = self.state
        return PagedState(
            lightning={i: t[:num_rows] for i, t in state.lightning.items()},
            keys={},
            values={},
            length_B=state.length_B[:num_rows],
            fixed_capacity=True,
            pages=state.pages,
            page_BM=state.page_BM[:num_rows],
        )

    def select_rows(self, rows_B: Tensor, spans: tuple[Span, ...]) -> PagedState:
        """Copies of some rows' states, a span each; `put` brings them back."""
        state = self.state
        return PagedState(
            lightning={i: t.index_select(0, rows_B) for i, t in state.lightning.items()},
            keys={},
            values={},
            length_B=state.length_B.index_select(0, rows_B),
            fixed_capacity=True,
            pages=state.pages,
            page_BM=state.page_BM.index_select(0, rows_B),
            spans=spans,
        )

    def put(self, rows_B: Tensor, part: PagedState) -> None:
        for i, t in part.lightning.items():
            self.state.lightning[i][rows_B] = t
        self.state.length_B[rows_B] = part.length_B

    def _append(self, row: int, pages: list[int]) -> None:
        held = self._held[row]
        start, end = len(held), len(held) + len(pages)
        table_M = self.state.page_BM[row]
        assert end <= len(table_M), f"{end} pages, a row has at most {len(table_M)}"
        held += pages
        table_M[start:end] = torch.tensor(pages, dtype=torch.int32)

    def _copy_states(self, source: int, target: int) -> None:
        for t in self.state.lightning.values():
            t[target] = t[source]
        self.state.length_B[target] = self.state.length_B[source]
        self.state.page_BM[target] = self.state.page_BM[source]
        self.last_RE[target] = self.last_RE[source]
