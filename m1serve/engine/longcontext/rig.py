"""A model of random weights with rows as the engine holds them; no requests, no thread."""

# B rows, T tokens, E hidden, V vocabulary

from __future__ import annotations

import torch
from torch import Tensor

from m1serve.config import EngineSettings
from m1serve.engine.cache_memory import CacheMemory
from m1serve.engine.decode_step import DecodeStep
from m1serve.engine.slots import SlotPool
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.paged import Span


class Rig:
    """Rows of one model. What is read is random; what is decoded may follow a made-up context."""

    def __init__(self, model: M1ForCausalLM, settings: EngineSettings) -> None:
        self.model, self.settings = model, settings
        self.device = model.embed_tokens.weight.device
        self.memory = CacheMemory(model, settings)
        self.pool: SlotPool = self.memory.new_pool()
        self._random = torch.Generator(device=self.device).manual_seed(1)

    def random_ids(self, num_tokens: int) -> Tensor:
        """int64 [T]"""
        vocab = self.model.config.vocab_size
        return torch.randint(vocab, (num_tokens,), device=self.device, generator=self._random)

    @torch.inference_mode()
    def read(self, row: int, id_T: Tensor, *, chunk_tokens: int, start: int = 0) -> None:
        """As the engine reads a prompt: in chunks, into pages, behind what the row holds."""
        if not self.pool.reserve(row, start + len(id_T)):
            raise MemoryError(f"no pages for {start + len(id_T)} tokens; lower the contexts")
        rows_1 = torch.tensor([row], device=self.device)
        for at in range(0, len(id_T), chunk_tokens):
            part_T = id_T[at : at + chunk_tokens]
            span = Span(start=start + at, num_tokens=len(part_T))
            part = self.pool.select_rows(rows_1, (span,))
            hidden_1TE, _ = self.model.hidden(part_T[None], part)
            self.pool.put(rows_1, part)
            self.pool.last_RE[row] = hidden_1TE[0, -1]

    @torch.inference_mode()
    def make_up(self, num_rows: int, context: int, *, room: int) -> None:
        """Rows that look as if they had read so many tokens; only for timing."""
        for row in range(num_rows):
            self.pool.clear(row)
            if not self.pool.reserve(row, context + room):
                raise MemoryError(f"no pages for {num_rows} rows of {context} tokens")
            self.pool.last_RE[row].normal_(generator=self._random)
            self.pool.state.length_B[row] = context
            for t in self.pool.state.lightning.values():
                t[row].normal_(generator=self._random)

    def fill_pages(self) -> None:
        """Random keys and values in every page, so that none is free of cost."""
        pages = self.pool.state.pages
        for t in (*pages.keys.values(), *pages.values.values()):
            t.normal_(generator=self._random)

    def clear(self) -> None:
        for row in range(self.pool.num_rows):
            self.pool.clear(row)

    def decode_step(self, *, with_graphs: bool) -> DecodeStep:
        return DecodeStep(self.model, self.pool, with_graphs=with_graphs)
