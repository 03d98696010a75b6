"""Ragged prompt reading: rows of different lengths in one forward, padded on the right."""

# B rows read together, T tokens, S of them at once, E hidden, V vocabulary

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from m1serve.engine.generation import Sequence
from m1serve.engine.slots import SlotPool
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.paged import Span
from m1serve.types import TopLogprob

TOP_LOGPROBS_STEP = 64
"""Rows of logits that exist at once: 51 MB with M1's vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The next `num_tokens` of a sequence."""

    sequence: Sequence
    num_tokens: int

    @property
    def span(self) -> Span:
        return Span(start=self.sequence.num_read, num_tokens=self.num_tokens)

    @property
    def end(self) -> int:
        return self.sequence.num_read + self.num_tokens


def read_together(
    model: M1ForCausalLM, pool: SlotPool, readings: Rows[Reading], *, vocab_size: int
) -> None:
    """One forward; moves each `num_read` on and leaves the last hidden states in the pool.

    The rows have pages for what they read. Of the logits only the first `vocab_size` are tokens.
    """
    device = pool.last_RE.device
    width = max(reading.num_tokens for reading in readings)
    rows_B = torch.tensor([r.sequence.row for r in readings], device=device)
    count_B = torch.tensor([r.num_tokens for r in readings], device=device)
    is_ragged = any(r.num_tokens != width for r in readings)
    part = pool.select_rows(rows_B, tuple(r.span for r in readings))
    ids_BT = _padded_ids(readings, width).to(device)
    hidden_BTE, _ = model.hidden(ids_BT, part, count_B if is_ragged else None)
    pool.put(rows_B, part)
    last_BE = hidden_BTE[torch.arange(len(readings), device=device), count_B - 1]
    pool.last_RE[rows_B] = last_BE
    for i, reading in enumerate(readings):
        if reading.sequence.generation.wants_prompt_logprobs:
            _note_prompt_logprobs(model, reading, hidden_BTE[i], vocab_size=vocab_size)
        reading.sequence.num_read = reading.end


def _padded_ids(readings: Rows[Reading], width: int) -> Tensor:
    """int64 [B, T]; 0 where a row has nothing to read."""
    ids_BT = np.zeros((len(readings), width), dtype=np.int64)
    for row_T, reading in zip(ids_BT, readings, strict=True):
        start = reading.sequence.num_read
        row_T[: reading.num_tokens] = reading.sequence.unread.array[start : reading.end]
    return torch.from_numpy(ids_BT)


def _note_prompt_logprobs(
    model: M1ForCausalLM, reading: Reading, hidden_TE: Tensor, *, vocab_size: int
) -> None:
    sequence, start = reading.sequence, reading.sequence.num_read
    next_ids = sequence.unread.array[start + 1 : reading.end + 1]
    next_T = torch.from_numpy(next_ids.astype(np.int64)).to(hidden_TE.device)
    logprob_T, _ = model.token_logprobs(hidden_TE[: len(next_T)], next_T)
    sequence.generation.prompt_logprobs += logprob_T.tolist()
    if wanted := sequence.request.top_logprobs:
        for at in range(0, len(next_T), TOP_LOGPROBS_STEP):
            hidden_SE = hidden_TE[at : min(at + TOP_LOGPROBS_STEP, len(next_T))]
            logprob_SV = torch.log_softmax(model.logits(hidden_SE), -1)[:, :vocab_size]
            top = logprob_SV.topk(wanted, dim=-1)
            for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True):
                row = zip(ids, values, strict=True)
                sequence.generation.prompt_top_logprobs.append(
                    tuple(TopLogprob(token_id=i, logprob=p) for i, p in row)
                )
