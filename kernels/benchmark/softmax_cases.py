"""The timed cases of softmax attention: decode over paged keys, prefill, stores and gathers.

Decode's floor is each key and value read once, prefill's the products of what is not masked.
Shapes: B rows, T tokens, H query heads, K kv heads, D head dim, P pages of S tokens, M table width.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from m1serve.kernels.benchmark.cases import ROTATION_BYTES, Case, K
from m1serve.kernels.benchmark.inputs import HEAD_DIM, NUM_HEADS
from m1serve.kernels.benchmark.layer_cases import case_of, normal, row_of
from m1serve.kernels.benchmark.report import OURS, Report, Row
from m1serve.kernels.benchmark.timing import cold_ms, graph_ms
from m1serve.kernels.paged import paged_decode, paged_gather, paged_store
from m1serve.kernels.softmax import Attend, by_cudnn, by_flash, in_parts, prefill_attention

NUM_KV_HEADS, PAGE_TOKENS = 8, 64
TOKEN_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 2
"""Key and value of a token."""
DENSE, CUDNN, FLASH = "torch SDPA, dense keys", "torch cuDNN", "torch flash"
DECODE, PREFILL = "paged_decode", "softmax_prefill"
# rows and tokens of each; a step of 1M tokens and 8 rows reads 34 GB
SHAPES = (
    *((1, length * K) for length in (1, 64, 256, 1024)),
    *((32, length * K) for length in (1, 64, 256)),
    (8, 1024 * K),
)
CHUNK = 64 * K
PASTS = (0, 1024 * K - CHUNK)
MAX_CALLS = 64


def softmax_cases() -> Iterator[Case]:
    for num_rows, num_tokens in SHAPES:
        name = decode_name(num_rows, num_tokens)
        for impl, run in ((OURS, _paged), (DENSE, _dense)):
            yield case_of(DECODE, name, impl, partial(run, num_rows, num_tokens))
    for num_past in PASTS:
        name = softmax_name(num_past)
        yield case_of(PREFILL, name, OURS, partial(_prefill, prefill_attention, num_past))
        # flash alone would take half a minute behind a past
        for impl, by in ((CUDNN, by_cudnn), (FLASH, by_flash))[: 1 if num_past else 2]:
            yield case_of(PREFILL, name, impl, partial(_prefill, partial(_joined, by), num_past))
    yield case_of("paged_store", f"T={CHUNK}", OURS, _store)
    yield case_of("paged_gather", f"T={1024 * K}", OURS, _gather)


def decode_name(num_rows: int, num_tokens: int) -> str:
    return f"B={num_rows} T={num_tokens}"


def softmax_name(num_past: int) -> str:
    return f"T={CHUNK}" + (f" after T={num_past}" if num_past else "")


def prefill_flops(num_tokens: int, num_past: int) -> float:
    """Two products a score, of the scores that are not masked."""
    return 4.0 * NUM_HEADS * HEAD_DIM * num_tokens * (num_past + num_tokens / 2)


def added_decode_ms(report: Report) -> float | None:
    """What 256K tokens of context add to one row's attention beyond 1K."""
    near, far = (report.time_of(DECODE, decode_name(1, length * K)) for length in (1, 256))
    return far - near if near is not None and far is not None else None


def prefill_tflop_s(report: Report, num_past: int) -> float | None:
    return report.extra_of(PREFILL, softmax_name(num_past), "tflop_s")


def _decode_row(calls: list[Callable[[], object]], num_rows: int, num_tokens: int) -> Row:
    num_bytes = num_rows * (num_tokens * TOKEN_BYTES + 2 * NUM_HEADS * HEAD_DIM * 2)
    return row_of(ms=graph_ms(calls), num_bytes=num_bytes)


def _num_calls(num_rows: int, num_tokens: int) -> int:
    """Each of its own keys, so that none of them is still in L2."""
    return min(MAX_CALLS, -(-ROTATION_BYTES // (num_rows * num_tokens * TOKEN_BYTES)))


@torch.no_grad()
def _paged(num_rows: int, num_tokens: int) -> Row:
    """Pages in random order, a table of its own for every call."""
    num_calls, M = _num_calls(num_rows, num_tokens), num_tokens // PAGE_TOKENS
    num_pages = num_calls * num_rows * M
    key, value = normal(2, num_pages, NUM_KV_HEADS, PAGE_TOKENS, HEAD_DIM)
    tables = torch.randperm(num_pages, device="cuda", dtype=torch.int32)
    length_B = torch.full((num_rows,), num_tokens, device="cuda")
    q_BHD = normal(num_rows, NUM_HEADS, HEAD_DIM)
    calls: list[Callable[[], object]] = [
        partial(paged_decode, q_BHD, key, value, page_BM, length_B)
        for page_BM in tables.view(num_calls, num_rows, M)
    ]
    return _decode_row(calls, num_rows, num_tokens)


@torch.no_grad()
def _dense(num_rows: int, num_tokens: int) -> Row:
    """What torch itself does where each row's keys lie in one piece."""
    num_calls = _num_calls(num_rows, num_tokens)
    shape = (num_calls, num_rows, NUM_KV_HEADS, num_tokens, HEAD_DIM)
    keys, values = normal(*shape), normal(*shape)
    q_BH1D = normal(num_rows, NUM_HEADS, 1, HEAD_DIM)
    attend = partial(F.scaled_dot_product_attention, q_BH1D, enable_gqa=True)
    calls: list[Callable[[], object]] = [
        partial(attend, key, value) for key, value in zip(keys, values, strict=True)
    ]
    return _decode_row(calls, num_rows, num_tokens)


@torch.no_grad()
def _prefill(attend: Callable[..., Tensor], num_past: int) -> Row:
    """The first call is timed besides: it plans for lengths that a server often meets but once."""
    q_THD = normal(CHUNK, NUM_HEADS, HEAD_DIM)
    k_TKD, v_TKD = normal(2, CHUNK, NUM_KV_HEADS, HEAD_DIM)
    past = [*normal(2, NUM_KV_HEADS, num_past, HEAD_DIM)] if num_past else []
    call = partial(attend, q_THD, k_TKD, v_TKD, *past)
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    first_s = time.perf_counter() - began
    num_flops = prefill_flops(CHUNK, num_past)
    ms = cold_ms(call)
    extra = {"tflop_s": num_flops / ms / 1e9, "first_s": first_s}
    return row_of(ms=ms, num_flops=num_flops, extra=extra)


def _joined(by: Attend, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *past: Tensor) -> Tensor:
    past_k, past_v = past or (None, None)
    return in_parts(q_THD, k_TKD, v_TKD, past_k, past_v, by)


@torch.no_grad()
def _store() -> Row:
    """Read once and written once, into pages in random order."""
    num_pages = CHUNK // PAGE_TOKENS
    key, value = normal(2, num_pages, NUM_KV_HEADS, PAGE_TOKENS, HEAD_DIM)
    k_NKD, v_NKD = normal(2, CHUNK, NUM_KV_HEADS, HEAD_DIM)
    page_N = torch.randperm(num_pages, device="cuda").repeat_interleave(PAGE_TOKENS)
    offset_N = torch.arange(CHUNK, device="cuda") % PAGE_TOKENS
    ms = cold_ms(lambda: paged_store(key, value, k_NKD, v_NKD, page_N, offset_N))
    return row_of(ms=ms, num_bytes=2 * CHUNK * TOKEN_BYTES)


@torch.no_grad()
def _gather() -> Row:
    num_tokens = 1024 * K
    num_pages = num_tokens // PAGE_TOKENS
    pool = normal(num_pages, NUM_KV_HEADS, PAGE_TOKENS, HEAD_DIM)
    page_M = torch.randperm(num_pages, device="cuda")
    ms = cold_ms(lambda: paged_gather(pool, page_M, num_tokens))
    # keys alone
    return row_of(ms=ms, num_bytes=num_tokens * TOKEN_BYTES)
