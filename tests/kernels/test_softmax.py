"""Attention of a chunk to itself and its past, against one attention over the whole sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from m1serve.kernels import softmax
from m1serve.kernels.softmax import Part, prefill_attention

BARS = {torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 3e-3}


def sequence(
    length: int, *, num_heads: int = 4, head_dim: int = 32, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, 4, D], k and v [T, 2, D] as views of one packed projection."""
    generator = torch.Generator().manual_seed(length)
    shape = (length, 2 * num_heads, head_dim)
    qkv = torch.randn(shape, generator=generator).to(dtype)
    q, k, v = qkv.split([num_heads, num_heads // 2, num_heads // 2], 1)
    return q, k, v


def exact(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """In float64, over a whole sequence."""
    group = q_THD.shape[1] // k_TKD.shape[1]
    q, k, v = (t.double().transpose(0, 1) for t in (q_THD, k_TKD, v_TKD))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    score_HTT = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    is_later_TT = torch.ones_like(score_HTT[0]).triu(1).bool()
    return (torch.softmax(score_HTT.masked_fill(is_later_TT, -torch.inf), -1) @ v).transpose(0, 1)


def in_chunks(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, borders: list[int]) -> Tensor:
    outputs = []
    for first, last in zip([0, *borders], [*borders, len(q_THD)], strict=True):
        past = [t[:first].transpose(0, 1) for t in (k_TKD, v_TKD)]
        outputs.append(
            prefill_attention(q_THD[first:last], k_TKD[first:last], v_TKD[first:last], *past)
        )
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 200])
def test_a_whole_sequence_is_attended_to_causally(length: int, dtype: torch.dtype) -> None:
    q, k, v = sequence(length, dtype=dtype)
    got = prefill_attention(q, k, v)
    assert got.dtype == dtype
    error = (got.double() - exact(q, k, v)).norm() / exact(q, k, v).norm()
    assert float(error) <= BARS[dtype]


@pytest.mark.parametrize("borders", [[1], [16], [199], [7, 8, 100], [64, 128]], ids=str)
def test_chunks_agree_with_the_whole_sequence(borders: list[int]) -> None:
    q, k, v = sequence(200)
    got = in_chunks(q, k, v, borders)
    torch.testing.assert_close(got.double(), exact(q, k, v), rtol=0, atol=1e-6)
    torch.testing.assert_close(got, prefill_attention(q, k, v), rtol=0, atol=1e-6)


def test_few_scores_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = sequence(200)
    wanted = in_chunks(q, k, v, [90])
    for scores in (1, 4 * 200 * 7):
        monkeypatch.setattr(softmax, "BLOCK_SCORES", scores)
        torch.testing.assert_close(in_chunks(q, k, v, [90]), wanted, rtol=0, atol=1e-6)


def test_odd_head_dims_and_single_heads_are_taken() -> None:
    for num_heads, head_dim in ((2, 20), (6, 16), (16, 8)):
        q, k, v = sequence(50, num_heads=num_heads, head_dim=head_dim)
        got = in_chunks(q, k, v, [30])
        torch.testing.assert_close(got.double(), exact(q, k, v), rtol=0, atol=1e-6)


def test_an_empty_chunk_gives_nothing() -> None:
    q, k, v = sequence(0)
    assert prefill_attention(q, k, v).shape == (0, 4, 32)


def test_wrong_arguments_are_named() -> None:
    q, k, v = sequence(5)
    past = torch.zeros(2, 7, 32)
    with pytest.raises(ValueError, match="one of past_k and past_v is missing"):
        prefill_attention(q, k, v, past)
    with pytest.raises(ValueError, match=r"past_v has shape \[2, 6, 32\], wanted \[2, 7, 32\]"):
        prefill_attention(q, k, v, past, past[:, 1:])
    with pytest.raises(ValueError, match=r"k has shape \[4, 2, 32\], wanted \[5, 2, 32\]"):
        prefill_attention(q, k[1:], v)
    with pytest.raises(ValueError, match="q has 3 heads and k 2"):
        prefill_attention(q[:, :3], k, v)
    with pytest.raises(ValueError, match=r"k is torch\.float16"):
        prefill_attention(q, k.half(), v)


def part(q_HTD: Tensor, k_HLD: Tensor, v_HLD: Tensor, dtype: torch.dtype) -> Part:
    """Unmasked attention as torch's kernels give it: rounded, with its log-sum-exp."""
    score_HTL = q_HTD @ k_HLD.transpose(1, 2)
    o_HTD = torch.softmax(score_HTL, -1) @ v_HLD
    return Part(o_HTD.transpose(0, 1).to(dtype), torch.logsumexp(score_HTL, -1).float())


@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("head_dim", [20, 128])
def test_two_parts_join_to_attention_over_both(
    dtype: torch.dtype, head_dim: int, device: torch.device
) -> None:
    from m1serve.kernels.softmax_triton import join_

    q, k, v = torch.randn(3, 3, 37, head_dim, dtype=torch.float64)
    wanted = torch.softmax(q @ k.transpose(1, 2), -1) @ v
    a, b = part(q, k[:, :20], v[:, :20], dtype), part(q, k[:, 20:], v[:, 20:], dtype)
    into = Part(a.o_THD.to(device), a.lse_HT.to(device))
    join_(into, Part(b.o_THD.to(device), b.lse_HT.to(device)))
    error = (into.o_THD.double().cpu() - wanted.transpose(0, 1)).norm() / wanted.norm()
    assert float(error) <= {torch.float32: 1e-6}.get(dtype, 4e-3)
    lse_HT = torch.logsumexp(q @ k.transpose(1, 2), -1).float()
    torch.testing.assert_close(into.lse_HT.cpu(), lse_HT, rtol=0, atol=1e-5)


def test_a_part_of_no_keys_changes_nothing(device: torch.device) -> None:
    from m1serve.kernels.softmax_triton import join_

    o_THD, lse_HT = torch.randn(18, 2, 16, device=device), torch.randn(2, 18, device=device)
    into = Part(o_THD.clone(), lse_HT.clone())
    join_(into, Part(torch.zeros_like(o_THD), torch.full_like(lse_HT, -torch.inf)))
    assert torch.equal(into.o_THD, o_THD)
    torch.testing.assert_close(into.lse_HT, lse_HT)


def cpu_flash(q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, *, is_causal: bool) -> Part:
    """torch's own flash kernel for CPUs stands in for those of a GPU."""
    group = q_1HTD.shape[1] // k_1KTD.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k_1KTD, v_1KTD))
    o_1HTD, lse_1HT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_1HTD, k, v, 0.0, is_causal
    )
    return Part(o_1HTD[0].transpose(0, 1), lse_1HT[0])


@pytest.mark.parametrize("past_tokens", [20, 64, 1000])
@pytest.mark.parametrize("num_past", [0, 1, 63, 64, 130])
def test_a_chunk_and_the_pieces_of_its_past_join_to_the_whole(
    num_past: int, past_tokens: int, interpreter: None
) -> None:
    q, k, v = sequence(200)
    past = [t[:num_past].transpose(0, 1) for t in (k, v)]
    own = [t[num_past:] for t in (q, k, v)]
    got = softmax.in_parts(*own, *past, cpu_flash, past_tokens=past_tokens)
    torch.testing.assert_close(got.double(), exact(q, k, v)[num_past:], rtol=0, atol=1e-6)
