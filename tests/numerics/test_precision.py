"""What a tiny model cannot show: precision at MiniMax-M1's own slopes, norms and positions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from m1serve.kernels.decay import slopes
from m1serve.kernels.norm import gated_rms_norm
from m1serve.kernels.reference import lightning_chunked, lightning_recurrent, lightning_step_
from m1serve.model.config import M1Config
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.lightning import LightningAttention
from m1serve.model.slice import slice_config
from m1serve.model.step import Step
from m1serve.model.tiny import tiny_config

NUM_TOKENS = 20_000
HEADS = ((0, 0), (0, 63), (40, 31), (78, 63))
"""(layer, head): the fastest, the slowest of the first layer, one between, the slowest of all."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def m1_slopes() -> Tensor:
    """[4]"""
    return torch.stack([slopes(64, 80, layer)[head] for layer, head in HEADS])


def random_qkv(num_tokens: int, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[1, T, H, 16] each"""
    generator = torch.Generator().manual_seed(0)
    shape = (1, num_tokens, num_heads, 16)
    q, k, v = (F.silu(torch.randn(shape, generator=generator)) for _ in range(3))
    return q, k, v


def error_by_head(got_HDD: Tensor, wanted_HDD: Tensor) -> list[float]:
    gap_H = (got_HDD.double() - wanted_HDD).flatten(1).norm(dim=1)
    errors: list[float] = (gap_H / wanted_HDD.flatten(1).norm(dim=1)).tolist()
    return errors


@pytest.fixture(scope="module")
def decoded() -> dict[str, list[float]]:
    """Error by head of the state after 20,000 single tokens, kept in four ways."""
    slope_H = m1_slopes()
    q, k, v = random_qkv(NUM_TOKENS, len(slope_H))
    _, wanted_1HDD = lightning_chunked(
        q.double(), k.double(), v.double(), slope_H.double(), chunk=250
    )
    zeros_1HDD = torch.zeros_like(wanted_1HDD, dtype=torch.float32)
    decay_H11 = torch.exp(-slope_H)[:, None, None]
    bf16_decay_H11 = decay_H11.bfloat16().float()
    states = {name: zeros_1HDD.clone() for name in ("ours", "power", "bf16", "bf16 decay")}
    for t in range(NUM_TOKENS):
        lightning_step_(q[:, t], k[:, t], v[:, t], slope_H, states["ours"])
        kv_1HDD = k[:, t, :, :, None] * v[:, t, :, None, :]
        for name, factor in (
            ("power", decay_H11),
            ("bf16", decay_H11),
            ("bf16 decay", bf16_decay_H11),
        ):
            states[name].mul_(factor).add_(kv_1HDD)
            if name != "power":
                states[name].copy_(states[name].bfloat16())
    return {name: error_by_head(state[0], wanted_1HDD[0]) for name, state in states.items()}


def test_the_state_is_exact_after_20_000_single_tokens(decoded: dict[str, list[float]]) -> None:
    assert max(decoded["ours"]) < 1e-5


def test_a_bf16_state_is_not(decoded: dict[str, list[float]]) -> None:
    assert min(decoded["bf16"]) > 1e-3
    assert decoded["bf16"][-1] > 0.1


def test_a_bf16_decay_is_not(decoded: dict[str, list[float]]) -> None:
    assert min(decoded["bf16 decay"]) > 2e-3
    assert max(decoded["bf16 decay"]) > 0.2
    late_H = torch.exp(-slopes(64, 80, 78)).bfloat16()
    assert int((late_H == 1).sum()) == 43


def test_one_rounded_factor_taken_again_and_again_drifts(decoded: dict[str, list[float]]) -> None:
    """Of the slowest head; the step multiplies by what is lost, 1 - exp(-s), instead."""
    assert decoded["power"][-1] > 20 * decoded["ours"][-1]


def test_a_power_of_a_bf16_decay_is_off_by_more_than_half_over_a_chunk() -> None:
    worst = 0.0
    for layer in (77, 78):
        slope_H = slopes(64, 80, layer).double()
        power_H = torch.exp(-slope_H).bfloat16().double() ** 256
        worst = max(worst, float((power_H / torch.exp(-256 * slope_H) - 1).abs().max()))
    assert worst > 0.5

    slope_H = slopes(64, 80, 78)
    nothing = torch.zeros(1, 256, 64, 1)
    _, kept = lightning_chunked(nothing, nothing, nothing, slope_H, torch.ones(1, 64, 1, 1))
    assert float((kept.flatten() / torch.exp(-256 * slope_H.double()) - 1).abs().max()) < 2e-6


def test_a_carried_state_decays_over_the_first_token_too() -> None:
    """vLLM's and SGLang's prefill leaves that step out: exact up to 256 tokens from zeros, and
    exp(s) too much of whatever was carried, 2.5 times for the first head of layer 0."""
    slope_H = slopes(64, 80, 0)[:4]
    q, k, v = random_qkv(64, 4)
    _, state_1HDD = lightning_recurrent(q, k, v, slope_H)
    wanted, _ = lightning_recurrent(q, k, v, slope_H, state_1HDD)
    within, _ = lightning_chunked(q, k, v, slope_H)
    right, _ = lightning_chunked(q, k, v, slope_H, state_1HDD)
    wrong = within + (right - within) * slope_H.exp()[:, None]
    by_head = [
        error_by_head(o[0].transpose(0, 1), wanted[0].transpose(0, 1)) for o in (right, wrong)
    ]
    assert max(by_head[0]) < 1e-5
    assert min(by_head[1]) > 1e-2
    assert float(slope_H[0].exp()) == pytest.approx(2.50, abs=0.01)


def test_the_output_norm_keeps_the_class_default_eps() -> None:
    """Where little comes out of the attention, the config's 1e-5 halves what is left of it."""
    layer = M1ForCausalLM(tiny_config(64)).blocks[0].self_attn
    assert isinstance(layer, LightningAttention)
    o_NI = 1e-3 * torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    gate_NI, weight_I = torch.zeros(8, 64), torch.ones(64)
    wanted = o_NI.double() / (o_NI.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() / 2
    right, wrong = (gated_rms_norm(o_NI, gate_NI, weight_I, eps) for eps in (layer.norm.eps, 1e-5))
    assert float((right - wanted).norm() / wanted.norm()) < 1e-6
    assert float((wrong - wanted).norm() / wanted.norm()) > 0.5


def test_rotary_frequencies_have_minimaxs_last_bit() -> None:
    """theta ** -x for 1 / theta ** x changes 17 of 32 frequencies of M1 by one bit."""
    pair_R = torch.arange(0, 64, 2, dtype=torch.int64).float()
    frequency_R = 1.0 / (10_000_000 ** (pair_R / 64))
    pos_T = torch.arange(1_000_000, 1_000_064)
    step = m1_step(slice_config(), start=1_000_000, num_tokens=64)
    angle_TR = torch.outer(pos_T.float(), frequency_R)
    assert torch.equal(step.cos_b1TR[0, 0], angle_TR.cos())
    assert torch.equal(step.sin_b1TR[0, 0], angle_TR.sin())
    other_TR = torch.outer(pos_T.float(), 10_000_000 ** (-pair_R / 64))
    assert float((other_TR.cos() - angle_TR.cos()).abs().max()) > 0.03


def test_positions_are_exact_to_the_end_and_need_no_table() -> None:
    """MiniMax's own code holds 5.2 GB of cosines and sines a softmax layer."""
    config = slice_config()
    last = config.max_position_embeddings - 1
    step = m1_step(config, start=last, num_tokens=1)
    assert step.cos_b1TR.shape == (1, 1, 1, 32)
    assert float(step.pos_bT.float()[0, 0]) == last
    assert float(step.cos_b1TR[0, 0, 0, 0]) == pytest.approx(
        float(torch.tensor(float(last), dtype=torch.float64).cos()), abs=1e-6
    )


def m1_step(config: M1Config, *, start: int, num_tokens: int) -> Step:
    return Step.build(config, torch.tensor([start]), num_tokens, None, start + num_tokens)
