"""How exact one decode step is, and twenty thousand of them; what a skipped row leaves alone.

Shapes: T tokens, B rows, H heads, D head dim, S slots; X = 3 D, q, k and v beside each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from m1serve.kernels.benchmark.checks import BARS, CheckCase, Setting
from m1serve.kernels.benchmark.inputs import (
    HEAD_DIM,
    Answer,
    answer_error,
    exact_answer,
    largest_difference,
    layer_slopes,
    random_sequences,
    worst,
    worst_error,
)
from m1serve.kernels.lightning import lightning_decode

LONG_BAR = 2e-4


def decode_checks(setting: Setting) -> Iterator[CheckCase]:
    for dtype, bar in BARS.items():
        for layer in setting.layers:
            for is_silu in (False, True):
                for num_rows in (1, 5, 64):

                    def run(
                        dtype: torch.dtype = dtype,
                        layer: int = layer,
                        is_silu: bool = is_silu,
                        num_rows: int = num_rows,
                    ) -> float:
                        slope_H = setting.slopes(layer)
                        return _decode_error(slope_H, num_rows, dtype, is_silu=is_silu)

                    case = f"B={num_rows} layer {layer}" + " SiLU" * is_silu
                    # SiLU of fp16 and bf16 inputs is rounded once more
                    allowed = bar * 2 if is_silu and dtype != torch.float32 else bar
                    yield CheckCase(op="decode", case=case, dtype=dtype, bar=allowed, run=run)
    yield CheckCase(
        op="decode",
        case=f"{setting.num_steps} steps, layers 0, 39, 78",
        dtype=torch.float32,
        bar=LONG_BAR,
        run=lambda: _long_decode_error(setting),
    )
    for name, run_bits in (
        ("a skipped row gives zeros, and no foreign slot changes a bit", _skipped_difference),
        ("the order of rows changes no bit", _order_difference),
    ):
        yield CheckCase(
            op="decode",
            case=name,
            dtype=torch.bfloat16,
            bar=0.0,
            run=partial(run_bits, setting),
        )


def _decode_error(slope_H: Tensor, num_rows: int, dtype: torch.dtype, *, is_silu: bool) -> float:
    """One step of rows whose slots lie in no order, among slots of NaN."""
    device, num_heads = slope_H.device, slope_H.numel()
    generator = torch.Generator(device).manual_seed(num_rows)
    qkv_BHX = torch.randn(num_rows, num_heads, 3 * HEAD_DIM, generator=generator, device=device)
    q, k, v = qkv_BHX.to(dtype).chunk(3, dim=-1)
    pool_shape = (2 * num_rows + 1, num_heads, HEAD_DIM, HEAD_DIM)
    pool_SHDD = torch.full(pool_shape, float("nan"), device=device)
    slot_B = torch.arange(num_rows, device=device).flip(0) * 2 + 1
    state_BHDD = torch.randn(num_rows, *pool_shape[1:], generator=generator, device=device)
    pool_SHDD[slot_B] = state_BHDD
    out_BHD = torch.full(q.shape, float("nan"), dtype=dtype, device=device)
    o_BHD = lightning_decode(
        q, k, v, slope_H, pool_SHDD, slot_B.int(), silu=is_silu, out_BHD=out_BHD
    )
    inputs = [t.double() for t in (q, k, v)]
    if is_silu:
        inputs = [t * torch.sigmoid(t) for t in inputs]
    wide_q, wide_k, wide_v = inputs
    decay_H11 = torch.exp(-slope_H.double()).view(-1, 1, 1)
    wanted_BHDD = state_BHDD.double() * decay_H11 + wide_k[..., None] * wide_v[..., None, :]
    wanted_BHD = (wide_q[..., None, :] @ wanted_BHDD).squeeze(-2)
    errors = [worst_error(a, b, head_dim=0) for a, b in zip(o_BHD, wanted_BHD, strict=True)]
    got_BHDD = pool_SHDD[slot_B]
    errors += [worst_error(a, b, head_dim=0) for a, b in zip(got_BHDD, wanted_BHDD, strict=True)]
    return worst(errors)


def _long_decode_error(setting: Setting) -> float:
    """The first and the last head of three layers, as the heads of one row, step after step."""
    ends = [layer_slopes(layer, setting.device)[head] for layer in (0, 39, 78) for head in (0, 63)]
    slope_H = torch.stack(ends)
    given = random_sequences([setting.num_steps], slope_H, dtype=torch.float32)
    pool_SHDD = torch.zeros(1, len(slope_H), HEAD_DIM, HEAD_DIM, device=slope_H.device)
    slot_B = torch.zeros(1, dtype=torch.int32, device=slope_H.device)
    o_THD = torch.empty(given.q_THD.shape, device=slope_H.device)
    for t in range(setting.num_steps):
        token = slice(t, t + 1)
        lightning_decode(
            given.q_THD[token],
            given.k_THD[token],
            given.v_THD[token],
            slope_H,
            pool_SHDD,
            slot_B,
            out_BHD=o_THD[token],
        )
    return answer_error(Answer(o_THD, pool_SHDD), exact_answer(given), given.cu_seqlens)


def _skipped_difference(setting: Setting) -> float:
    """Rows 1 and 3 are padding full of NaN; every slot but three holds NaN too.

    Compared with as many rows that are all real: how rows are tiled depends on how many they are.
    """
    slope_H = setting.slopes(0)
    qkv_BHX, pool_SHDD = _rows_and_pool(slope_H, num_rows=5)
    real_SHDD = pool_SHDD.clone()
    wanted_BHD = _step(qkv_BHX, slope_H, real_SHDD, [4, 0, 2, 1, 7])
    qkv_BHX[[1, 3]] = float("nan")
    pool_SHDD[[0, 1, 3, 5, 6]] = float("nan")
    before_SHDD = pool_SHDD.clone()
    o_BHD = _step(qkv_BHX, slope_H, pool_SHDD, [4, -1, 2, -1, 7])
    return worst(
        [
            largest_difference(o_BHD[[1, 3]], torch.zeros_like(o_BHD[[1, 3]])),
            largest_difference(o_BHD[[0, 2, 4]], wanted_BHD[[0, 2, 4]]),
            largest_difference(pool_SHDD[[0, 1, 3, 5, 6]], before_SHDD[[0, 1, 3, 5, 6]]),
            largest_difference(pool_SHDD[[2, 4, 7]], real_SHDD[[2, 4, 7]]),
            0.0 if bool(o_BHD.isfinite().all()) else float("inf"),
        ]
    )


def _order_difference(setting: Setting) -> float:
    slope_H = setting.slopes(0)
    qkv_BHX, pool_SHDD = _rows_and_pool(slope_H, num_rows=5)
    turned_SHDD = pool_SHDD.clone()
    slots, order = [4, 0, 2, 6, 7], [3, 1, 4, 0, 2]
    o_BHD = _step(qkv_BHX, slope_H, pool_SHDD, slots)
    turned_BHD = _step(qkv_BHX[order], slope_H, turned_SHDD, [slots[row] for row in order])
    return max(
        largest_difference(turned_BHD, o_BHD[order]), largest_difference(turned_SHDD, pool_SHDD)
    )


def _rows_and_pool(slope_H: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(slope_H.device).manual_seed(num_rows)
    num_heads, device = slope_H.numel(), slope_H.device
    qkv_BHX = torch.randn(num_rows, num_heads, 3 * HEAD_DIM, generator=generator, device=device)
    pool_shape = (8, num_heads, HEAD_DIM, HEAD_DIM)
    return qkv_BHX.bfloat16(), torch.randn(pool_shape, generator=generator, device=device)


def _step(qkv_BHX: Tensor, slope_H: Tensor, pool_SHDD: Tensor, slots: list[int]) -> Tensor:
    q_BHD, k_BHD, v_BHD = qkv_BHX.chunk(3, dim=-1)
    slot_B = torch.tensor(slots, dtype=torch.int32, device=qkv_BHX.device)
    out_BHD = torch.full(q_BHD.shape, float("nan"), dtype=q_BHD.dtype, device=q_BHD.device)
    return lightning_decode(q_BHD, k_BHD, v_BHD, slope_H, pool_SHDD, slot_B, out_BHD=out_BHD)
