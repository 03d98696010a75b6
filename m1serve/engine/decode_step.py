"""DecodeStep: one token for the first rows of a pool; on CUDA as a captured graph."""

# mypy: allow-untyped-calls
# N decoding rows, B rows of a graph, R rows of the pool, E hidden

from __future__ import annotations

import torch
from torch import Tensor

from m1serve.engine.slots import SlotPool
from m1serve.model.hybrid import M1ForCausalLM

_WARM_RUNS = 2
"""Before a capture: kernels are compiled and libraries set up outside of it."""


def graph_rows(num_rows: int, limit: int) -> int:
    """How many rows the graph for `num_rows` has: idle ones cost experts of their own, so few."""
    step = 1 if num_rows <= 8 else 4 if num_rows <= 32 else 8 if num_rows <= 128 else 32
    return min(-(-num_rows // step) * step, limit)


class DecodeStep:
    """Owned by the step thread. A graph is captured when its number of rows is first met."""

    def __init__(self, model: M1ForCausalLM, pool: SlotPool, *, with_graphs: bool) -> None:
        self._model, self._pool = model, pool
        device, num_rows = pool.last_RE.device, pool.num_rows
        self._graphs: dict[int, torch.cuda.CUDAGraph] | None = {} if with_graphs else None
        self._memory_pool = torch.cuda.graph_pool_handle() if with_graphs else None
        self._token_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._count_R = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def run(self, token_N: Tensor) -> None:
        """Reads a token a row (int64, on the device); states and last hidden states go on."""
        num_rows = len(token_N)
        if self._graphs is None:
            hidden_N1E, _ = self._model.hidden(token_N[:, None], self._pool.decode_view(num_rows))
            self._pool.last_RE[:num_rows] = hidden_N1E[:, 0]
            return
        graph = self._graph(graph_rows(num_rows, len(self._token_R)))
        self._token_R[:num_rows] = token_N
        self._count_R[:num_rows] = 1
        self._count_R[num_rows:] = 0
        graph.replay()

    def _graph(self, num_rows: int) -> torch.cuda.CUDAGraph:
        assert self._graphs is not None
        if num_rows not in self._graphs:
            # with no row at work nothing is changed, whoever lives in them
            self._count_R.zero_()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_RUNS):
                    self._masked_step(num_rows)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # other threads may load weights meanwhile
            with torch.cuda.graph(graph, pool=self._memory_pool, capture_error_mode="thread_local"):
                self._masked_step(num_rows)
            self._graphs[num_rows] = graph
        return self._graphs[num_rows]

    def _masked_step(self, num_rows: int) -> None:
        """Only rows whose count is 1 go on; the others may belong to sequences that read."""
        count_B, last_BE = self._count_R[:num_rows], self._pool.last_RE[:num_rows]
        hidden_B1E, _ = self._model.hidden(
            self._token_R[:num_rows, None], self._pool.decode_view(num_rows), count_B
        )
        torch.where(count_B[:, None] > 0, hidden_B1E[:, 0], last_BE, out=last_BE)
