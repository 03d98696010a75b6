"""How exact softmax attention is over paged keys and in chunks, against float64.

Shapes: B rows, T tokens, L tokens before them, H query heads, K kv heads, G = H/K, D head dim, P
pages of S tokens, M table width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from m1serve.kernels.benchmark.checks import CheckCase, Setting
from m1serve.kernels.benchmark.inputs import largest_difference, worst_error
from m1serve.kernels.paged import paged_decode, paged_gather, paged_store
from m1serve.kernels.softmax import prefill_attention

# weights are rounded before they meet the values, and two parts before they are joined
BARS = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 2e-6}
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 0, 500, 4097, 20_000)
S = 64


def softmax_checks(setting: Setting) -> Iterator[CheckCase]:
    lengths = LENGTHS if setting.is_large else LENGTHS[:-2]
    for dtype, bar in BARS.items():
        yield CheckCase(
            op="paged_decode",
            case="mixed lengths, NaN in free pages",
            dtype=dtype,
            bar=bar,
            run=partial(_decode_error, setting, dtype, lengths),
        )
        for num_past, num_tokens in ((0, 300), (77, 1), (300, 130), (3000, 2100)):
            if setting.is_large or num_past < 1000:
                yield CheckCase(
                    op="softmax_prefill",
                    case=f"T={num_tokens} after {num_past}",
                    dtype=dtype,
                    bar=bar,
                    run=partial(_prefill_error, setting, dtype, num_past, num_tokens),
                )
    bf16 = torch.bfloat16
    yield CheckCase(
        op="paged_decode",
        case="a row alone and among others",
        dtype=bf16,
        bar=0.0,
        run=partial(_alone_difference, setting),
    )
    if setting.is_large:
        for name, length, spare in (("T=1M", 1 << 20, 0), ("T=1000 beyond 2^31", 1000, 1 << 15)):
            run = partial(_decode_error, setting, bf16, [length], first_page=spare)
            yield CheckCase(op="paged_decode", case=name, dtype=bf16, bar=BARS[bf16], run=run)


def _heads(setting: Setting) -> tuple[int, int, int]:
    """H, K and D."""
    return (64, 8, 128) if setting.is_large else (4, 2, 32)


def _normal(setting: Setting, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator(setting.device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=setting.device, dtype=dtype)


class _Rows:
    """Rows of some lengths in shuffled pages from `first_page` on, stored by our own kernel."""

    def __init__(
        self, setting: Setting, dtype: torch.dtype, lengths: Sequence[int], first_page: int = 0
    ) -> None:
        H, K, D = _heads(setting)
        counts = [-(-length // S) for length in lengths]
        order = first_page + torch.randperm(sum(counts) + 2)
        num_pages = first_page + len(order)
        shape = (num_pages, K, S, D)
        # real memory up to the first page would hold nothing: NaN is only where pages are near
        self.key = torch.empty(shape, dtype=dtype, device=setting.device)
        self.value = torch.empty_like(self.key)
        self.key[first_page:], self.value[first_page:] = torch.nan, torch.nan
        table = torch.full((len(lengths), max(counts) + 1), int(order[-1]), dtype=torch.int32)
        self.keys, self.values = [], []
        taken = 0
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            own = order[taken : taken + count]
            table[row, :count] = own
            taken += count
            k, v = _normal(setting, dtype, 2, length, K, D)
            page = own.repeat_interleave(S)[:length].to(setting.device)
            offset = torch.arange(length, device=setting.device) % S
            paged_store(self.key, self.value, k, v, page, offset)
            self.keys.append(paged_gather(self.key, own, length))
            self.values.append(paged_gather(self.value, own, length))
            assert torch.equal(self.keys[-1], k.transpose(0, 1))
        self.page = table.to(setting.device)
        self.length = torch.tensor(lengths, device=setting.device)
        self.q = _normal(setting, dtype, len(lengths), H, D)

    def attend(self, rows: slice = slice(None)) -> Tensor:
        return paged_decode(self.q[rows], self.key, self.value, self.page[rows], self.length[rows])


def _decode_error(
    setting: Setting, dtype: torch.dtype, lengths: Sequence[int], *, first_page: int = 0
) -> float:
    rows = _Rows(setting, dtype, lengths, first_page)
    wanted_BHD = torch.zeros(rows.q.shape, dtype=torch.float64, device=rows.q.device)
    for row, length in enumerate(lengths):
        if length:
            q_H1D = rows.q[row][:, None]
            wanted_BHD[row] = _exact(q_H1D, rows.keys[row], rows.values[row], length - 1)[:, 0]
    return worst_error(rows.attend(), wanted_BHD, head_dim=1)


def _alone_difference(setting: Setting) -> float:
    if setting.device == "cpu":
        # torch promises no bits
        return 0.0
    rows = _Rows(setting, torch.bfloat16, LENGTHS)
    together = rows.attend()
    alone = [rows.attend(slice(row, row + 1)) for row in range(len(LENGTHS))]
    return largest_difference(torch.cat(alone), together)


def _prefill_error(setting: Setting, dtype: torch.dtype, num_past: int, num_tokens: int) -> float:
    H, K, D = _heads(setting)
    q = _normal(setting, dtype, num_tokens, H, D)
    k, v = _normal(setting, dtype, 2, num_past + num_tokens, K, D).transpose(1, 2)
    new = [t[:, num_past:].transpose(0, 1) for t in (k, v)]
    past = [t[:, :num_past] for t in (k, v)] if num_past else []
    got = prefill_attention(q, *new, *past)
    wanted = _exact(q.transpose(0, 1), k, v, num_past).transpose(0, 1)
    return worst_error(got, wanted, head_dim=1)


def _exact(q_HTD: Tensor, k_KLD: Tensor, v_KLD: Tensor, num_past: int) -> Tensor:
    """In float64, a query head at a time: token t attends to num_past + t + 1 keys."""
    group = len(q_HTD) // len(k_KLD)
    T, L = q_HTD.shape[1], k_KLD.shape[1]
    is_later_TL = torch.ones(T, L, dtype=torch.bool, device=q_HTD.device).triu(num_past + 1)
    heads = []
    for head, q_TD in enumerate(q_HTD.double()):
        k_LD, v_LD = (t[head // group].double() for t in (k_KLD, v_KLD))
        score_TL = q_TD @ k_LD.T / q_TD.shape[-1] ** 0.5
        heads.append(torch.softmax(score_TL.masked_fill_(is_later_TL, -torch.inf), -1) @ v_LD)
    return torch.stack(heads)
