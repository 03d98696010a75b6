"""Keys and values in pages: what the rows of a serving pool carry, however long each has become.

A page holds the same tokens of one sequence in every softmax layer; several may share it.
Shapes: P pages, S tokens a page, M pages a row, B rows, T tokens, H heads, K kv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m1serve.kernels.paged import paged_decode, paged_gather, paged_store
from m1serve.kernels.softmax import prefill_attention
from m1serve.model.config import M1Config
from m1serve.model.state import SequenceState
from m1serve.model.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPages:
    """The pages of all sequences on one device. Who owns which is the caller's business."""

    keys: dict[int, Tensor]
    """layer -> [P, K, S, D], rotated"""
    values: dict[int, Tensor]

    @classmethod
    def allocate(
        cls,
        config: M1Config,
        num_pages: int,
        page_tokens: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> KeyPages:
        """Zeroed; on the CPU memory is taken when a page is first written."""
        shape = (num_pages, config.num_key_value_heads, page_tokens, config.head_dim)

        def pages() -> dict[int, Tensor]:
            return {
                i: torch.zeros(shape, dtype=dtype, device=device) for i in config.softmax_layers
            }

        return cls(keys=pages(), values=pages())

    def copy_page(self, source: int, target: int) -> None:
        for group in (self.keys, self.values):
            for t_PKSD in group.values():
                t_PKSD[target].copy_(t_PKSD[source])


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What a row reads in one forward: `num_tokens` behind its first `start`."""

    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the one new token of each row goes, and how far its query looks; -1 and 0: nowhere."""

    page_B: Tensor
    offset_B: Tensor
    length_B: Tensor


@dataclass(slots=True, kw_only=True)
class PagedState(SequenceState):
    """Rows whose keys lie in pages. A forward updates it in place and never waits for the device.

    Each row's table must hold pages for all that the forward adds. More than one token a row needs
    `spans`, a row each; the pages of a span's tokens must belong to that row alone.
    """

    pages: KeyPages
    page_BM: Tensor
    """int32 [B, M]; entries past a row's pages are never used"""
    spans: tuple[Span, ...] = ()
    _places: tuple[Step, Places] | None = None

    def columns_after(self, num_new: int) -> int:
        """No query needs a mask over columns here."""
        return 0

    def attend(
        self, layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, step: Step
    ) -> Tensor:
        key_PKSD, value_PKSD = self.pages.keys[layer], self.pages.values[layer]
        dtype = key_PKSD.dtype
        q_BTHD, k_BTKD, v_BTKD = q_BTHD.to(dtype), k_BTKD.to(dtype), v_BTKD.to(dtype)
        if q_BTHD.shape[1] > 1:
            return self._prefill(layer, q_BTHD, k_BTKD, v_BTKD)
        places = self._places_of(step)
        paged_store(
            key_PKSD, value_PKSD, k_BTKD[:, 0], v_BTKD[:, 0], places.page_B, places.offset_B
        )
        o_BHD = paged_decode(q_BTHD[:, 0], key_PKSD, value_PKSD, self.page_BM, places.length_B)
        return o_BHD.unsqueeze(1)

    def _prefill(self, layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
        out_BTHD = torch.zeros_like(q_BTHD)
        key_PKSD, value_PKSD = self.pages.keys[layer], self.pages.values[layer]
        S = key_PKSD.shape[2]
        for b, (span, page_M) in enumerate(zip(self.spans, self.page_BM, strict=True)):
            if span.num_tokens == 0:
                continue
            new = slice(span.num_tokens)
            k_TKD, v_TKD = k_BTKD[b, new], v_BTKD[b, new]
            past = (
                [paged_gather(t, page_M, span.start) for t in (key_PKSD, value_PKSD)]
                if span.start
                else [None, None]
            )
            out_BTHD[b, new] = prefill_attention(q_BTHD[b, new], k_TKD, v_TKD, *past)
            pos_T = torch.arange(span.start, span.start + span.num_tokens, device=page_M.device)
            paged_store(key_PKSD, value_PKSD, k_TKD, v_TKD, page_M[pos_T // S], pos_T % S)
        return out_BTHD

    def _places_of(self, step: Step) -> Places:
        if self._places is None or self._places[0] is not step:
            pos_B = step.pos_BT[:, 0]
            S = next(iter(self.pages.keys.values())).shape[2]
            # an idle row may be full
            column_B = (pos_B // S).clamp(max=self.page_BM.shape[1] - 1)
            page_B = self.page_BM.gather(1, column_B[:, None])[:, 0]
            length_B = pos_B + 1
            if step.count_B is not None:
                is_idle_B = step.count_B == 0
                page_B = page_B.masked_fill(is_idle_B, -1)
                length_B = length_B.masked_fill(is_idle_B, 0)
            self._places = (step, Places(page_B=page_B, offset_B=pos_B % S, length_B=length_B))
        return self._places[1]
