"""The timed cases of lightning attention: prefill, forward and backward, decode.

Bytes are counted in units u = T x H x D values of bf16: prefill reads q, k, v and writes o (4 u);
forward and backward add q, k, v, do, dq, dk, dv (11 u); decode reads and writes the fp32 states.
Shapes: T tokens, B rows, H heads, D head dim, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from m1serve.kernels.benchmark.inputs import (
    HEAD_DIM,
    NUM_HEADS,
    Sequences,
    layer_slopes,
    random_sequences,
)
from m1serve.kernels.benchmark.peers import Peer
from m1serve.kernels.benchmark.report import OURS, Row
from m1serve.kernels.benchmark.timing import cold_ms, graph_ms

K = 1024
LENGTHS = (K, 4 * K, 16 * K, 64 * K, 256 * K, 1024 * K)
SHARE_LENGTHS = (64 * K, 256 * K, 1024 * K)
TRAINING_LENGTHS = (4 * K, 16 * K, 64 * K)
BATCHES = (1, 8, 32, 64, 128, 256, 512)
FIRST, MIDDLE, LAST = 0, 39, 78
RAGGED = (1, 63, 500, 4097, 17, 16384, 2048, 1000, 32768, 8658)
STATE_BYTES = NUM_HEADS * HEAD_DIM * HEAD_DIM * 4
# decode rotates over this much state, so that none of it is still in L2
ROTATION_BYTES = 512 << 20
SCALE = "in-place scale of the state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the result, measured when `run` is called."""

    op: str
    case: str
    impl: str
    run: Callable[[], Row]


MIN_STEPS = 32


def prefill_bytes(num_tokens: int, num_heads: int) -> int:
    return 4 * num_tokens * num_heads * HEAD_DIM * 2


def training_bytes(num_tokens: int, num_heads: int) -> int:
    return 11 * num_tokens * num_heads * HEAD_DIM * 2


def decode_bytes(num_rows: int) -> int:
    return 2 * num_rows * STATE_BYTES


def prefill_name(num_tokens: int, layer: int) -> str:
    return f"H={NUM_HEADS} T={num_tokens} layer {layer}"


def share_name(num_tokens: int, layer: int) -> str:
    """One GPU's eight heads under TP8: the fastest to forget, or the slowest."""
    return f"H=8 T={num_tokens} layer {layer} heads {'0-7' if layer == FIRST else '56-63'}"


def varlen_name(lengths: Sequence[int], layer: int) -> str:
    kind = f"N={len(lengths)} x {lengths[0]}" if len(set(lengths)) == 1 else "ragged"
    return f"H={NUM_HEADS} {kind} T={sum(lengths)} layer {layer}"


def prefill_cases(impl: Peer, lengths: Sequence[int] = LENGTHS) -> Iterator[Case]:
    """Three layers' slopes of ours; a peer's time does not depend on them."""
    layers = (FIRST, MIDDLE, LAST) if impl.name == OURS else (MIDDLE,)
    # 64K first: an autotuner decides on its first call
    for num_tokens in sorted(lengths, key=lambda length: abs(length - 64 * K)):
        for layer in layers:
            if impl.takes("prefill", num_tokens):
                name = prefill_name(num_tokens, layer)
                yield _prefill(impl, name, [num_tokens], layer)


def share_cases(impl: Peer, lengths: Sequence[int] = SHARE_LENGTHS) -> Iterator[Case]:
    for num_tokens in lengths:
        for layer, heads in ((FIRST, slice(0, 8)), (LAST, slice(56, 64))):
            if impl.takes("prefill", num_tokens) and impl.name in (OURS, "fla"):
                yield _prefill(impl, share_name(num_tokens, layer), [num_tokens], layer, heads)


def varlen_cases(impl: Peer) -> Iterator[Case]:
    for lengths in ((8 * K,) * 8, RAGGED):
        if impl.takes("prefill", sum(lengths)):
            yield _prefill(impl, varlen_name(lengths, MIDDLE), lengths, MIDDLE)


def _prefill(
    impl: Peer, name: str, lengths: Sequence[int], layer: int, heads: slice = slice(None)
) -> Case:
    def run() -> Row:
        slope_H = layer_slopes(layer, "cuda", heads)
        # what was packed is freed here where the peer has made its own copies
        call = impl.prefill(random_sequences(lengths, slope_H))
        torch.cuda.empty_cache()
        num_bytes = prefill_bytes(sum(lengths), slope_H.numel())
        return Row(op="prefill", case=name, impl=impl.name, ms=cold_ms(call), num_bytes=num_bytes)

    return Case(op="prefill", case=name, impl=impl.name, run=run)


def training_cases(impl: Peer, lengths: Sequence[int] = TRAINING_LENGTHS) -> Iterator[Case]:
    for num_tokens in sorted(lengths, reverse=True):
        for layer in (FIRST, MIDDLE, LAST) if impl.name == OURS else (MIDDLE,):
            if impl.takes("training", num_tokens):
                yield _training(impl, num_tokens, layer)


def _training(impl: Peer, num_tokens: int, layer: int) -> Case:
    op, name = "forward_backward", prefill_name(num_tokens, layer)

    def run() -> Row:
        sequences: Sequences = random_sequences([num_tokens], layer_slopes(layer, "cuda"))
        do_THD = torch.randn(sequences.q_THD.shape, device="cuda", dtype=torch.bfloat16)
        ms = cold_ms(impl.training(sequences, do_THD))
        num_bytes = training_bytes(num_tokens, NUM_HEADS)
        return Row(op=op, case=name, impl=impl.name, ms=ms, num_bytes=num_bytes)

    return Case(op=op, case=name, impl=impl.name, run=run)


def decode_cases(impl: Peer, batches: Sequence[int] = BATCHES) -> Iterator[Case]:
    """One token a row in a CUDA graph that rotates over more states than L2 holds."""
    for num_rows in batches:
        if impl.takes("decode", num_rows):
            yield _decode(num_rows, impl.name, impl.decode)
        if impl.name == OURS:
            yield _decode(num_rows, SCALE, _scale)


def _scale(
    qkv_BHX: Tensor, slope_H: Tensor, pool_SHDD: Tensor, slot_B: Tensor
) -> Callable[[], Tensor]:
    first = int(slot_B[0])
    state_BHDD = pool_SHDD[first : first + len(slot_B)]
    return lambda: state_BHDD.mul_(0.999)


def _decode(
    num_rows: int,
    impl: str,
    prepare: Callable[[Tensor, Tensor, Tensor, Tensor], Callable[[], Tensor]],
) -> Case:
    name = f"B={num_rows}"

    def run() -> Row:
        slope_H = layer_slopes(MIDDLE, "cuda")
        num_sets = max(2, -(-ROTATION_BYTES // (num_rows * STATE_BYTES)))
        pool_shape = (num_sets * num_rows, NUM_HEADS, HEAD_DIM, HEAD_DIM)
        pool_SHDD = torch.randn(pool_shape, device="cuda")
        calls = []
        for i in range(num_sets):
            qkv_BHX = torch.randn(num_rows, NUM_HEADS, 3 * HEAD_DIM, device="cuda").bfloat16()
            slot_B = torch.arange(num_rows, dtype=torch.int32, device="cuda") + i * num_rows
            calls.append(prepare(qkv_BHX, slope_H, pool_SHDD, slot_B))
        # enough steps that the start of a replay does not count
        calls = calls * -(-MIN_STEPS // num_sets)
        num_bytes = decode_bytes(num_rows)
        return Row(op="decode", case=name, impl=impl, ms=graph_ms(calls), num_bytes=num_bytes)

    return Case(op="decode", case=name, impl=impl, run=run)
