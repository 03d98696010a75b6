"""The Hopper attention kernel against float64: lengths, strides, what lies past the keys, bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from m1serve.kernels.softmax import HOPPER_TOKENS, by_hopper, prefill_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
H, K, D = 16, 2, 128
# a weight is rounded to bf16 before it meets the values, and the output once
BAR = 4e-3


def projection(num_tokens: int, seed: int = 0) -> list[Tensor]:
    """q [1, H, T, D], k and v [1, K, T, D] as views of one packed projection."""
    generator = torch.Generator("cuda").manual_seed(seed + num_tokens)
    shape = (num_tokens, H + 2 * K, D)
    qkv = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    return [t.transpose(0, 1)[None] for t in qkv.split([H, K, K], 1)]


def exact(q_1HTD: Tensor, k_1KLD: Tensor, v_1KLD: Tensor, *, is_causal: bool) -> tuple[Tensor, ...]:
    """o [T, H, D] and log-sum-exp [H, T] in float64."""
    group = q_1HTD.shape[1] // k_1KLD.shape[1]
    q, k, v = (t[0].double() for t in (q_1HTD, k_1KLD, v_1KLD))
    score_HTL = q @ k.repeat_interleave(group, 0).transpose(1, 2) / D**0.5
    if is_causal:
        is_later = torch.ones_like(score_HTL[0]).triu(1).bool()
        score_HTL = score_HTL.masked_fill(is_later, -torch.inf)
    o_HTD = torch.softmax(score_HTL, -1) @ v.repeat_interleave(group, 0)
    return o_HTD.transpose(0, 1), torch.logsumexp(score_HTL, -1)


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 127, 128, 129, 255, 300, 1000, 2111])
def test_a_chunk_attends_to_itself(num_tokens: int) -> None:
    given = projection(num_tokens)
    got = by_hopper(*given, is_causal=True)
    wanted_THD, wanted_HT = exact(*given, is_causal=True)
    assert error(got.o_THD, wanted_THD) < BAR
    torch.testing.assert_close(got.lse_HT.double(), wanted_HT, rtol=0, atol=1e-3)


@pytest.mark.parametrize("num_keys", [1, 100, 128, 129, 256, 257, 384, 3000])
@pytest.mark.parametrize("num_tokens", [130, 256])
def test_a_chunk_attends_to_all_of_its_past(num_tokens: int, num_keys: int) -> None:
    (q, _, _), (_, k, v) = projection(num_tokens), projection(num_keys, seed=1)
    got = by_hopper(q, k, v, is_causal=False)
    wanted_THD, wanted_HT = exact(q, k, v, is_causal=False)
    assert error(got.o_THD, wanted_THD) < BAR
    torch.testing.assert_close(got.lse_HT.double(), wanted_HT, rtol=0, atol=1e-3)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    q, k, v = projection(700)
    q = q * 30
    got = by_hopper(q, k, v, is_causal=True)
    wanted_THD, wanted_HT = exact(q, k, v, is_causal=True)
    assert error(got.o_THD, wanted_THD) < BAR
    torch.testing.assert_close(got.lse_HT.double(), wanted_HT, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("num_keys", [1, 63, 65, 777, 896])
@pytest.mark.parametrize("is_gathered", [True, False])
def test_what_lies_past_the_keys_is_not_seen(is_gathered: bool, num_keys: int) -> None:
    """Heads one after the other, or side by side as in a projection."""
    q, _, _ = projection(256)
    shape = (2, K, 1000, D) if is_gathered else (2, 1000, K, D)
    room = torch.full(shape, torch.nan, device="cuda", dtype=torch.bfloat16)
    both = room[:, :, :num_keys] if is_gathered else room[:, :num_keys].transpose(1, 2)
    k, v = both.normal_()[:, None]
    got = by_hopper(q, k, v, is_causal=False)
    assert error(got.o_THD, exact(q, k, v, is_causal=False)[0]) < BAR


def test_a_tokens_bits_do_not_depend_on_the_queries_beside_it() -> None:
    q, k, v = projection(1024)
    whole = by_hopper(q, k, v, is_causal=False).o_THD
    assert torch.equal(by_hopper(q, k, v, is_causal=False).o_THD, whole)
    assert torch.equal(by_hopper(q[:, :, 100:400], k, v, is_causal=False).o_THD, whole[100:400])


@pytest.mark.parametrize("num_past", [HOPPER_TOKENS, 1500])
def test_chunk_and_past_join_to_the_whole(num_past: int) -> None:
    q, k, v = projection(num_past + 900)
    new = [t[0, :, num_past:].transpose(0, 1) for t in (q, k, v)]
    past = [t[0, :, :num_past] for t in (k, v)]
    wanted_THD, _ = exact(q, k, v, is_causal=True)
    # both parts are rounded before they are joined
    assert error(prefill_attention(*new, *past), wanted_THD[num_past:]) < 1.5 * BAR


def test_turns_change_no_bit() -> None:
    from m1serve.kernels.softmax_hopper import attend

    q, k, v = (t[0].transpose(0, 1) for t in projection(3000))
    o, lse = attend(q, k, v, is_causal=True)
    other_o, other_lse = attend(q, k, v, is_causal=True, takes_turns=False)
    assert torch.equal(o, other_o)
    assert torch.equal(lse, other_lse)
