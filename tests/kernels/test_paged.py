"""Attention over paged keys against float64, in torch and Triton, with NaN all around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from m1serve.kernels.paged import paged_decode, paged_gather, paged_store

BARS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 6e-3}
S = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Sequences in shuffled pages; all that no row uses is NaN."""

    key_PKSD: Tensor
    value_PKSD: Tensor
    page_BM: Tensor
    length_B: Tensor
    keys: list[Tensor]
    "[L, K, D] of each row"
    values: list[Tensor]


def filled(
    lengths: Sequence[int],
    *,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    page_tokens: int = S,
    spare: int = 2,
    device: torch.device | str = "cpu",
) -> Pool:
    generator = torch.Generator().manual_seed(sum(lengths) + head_dim)
    counts = [-(-length // page_tokens) for length in lengths]
    num_pages = sum(counts) + spare
    order = torch.randperm(num_pages, generator=generator).tolist()
    shape = (num_pages, num_kv_heads, page_tokens, head_dim)
    key, value = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    # unused entries name free pages, and nothing
    page_BM = torch.full((len(lengths), max([*counts, 1]) + 1), order[-1], dtype=torch.int32)
    page_BM[:, -1] = -1
    keys, values = [], []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own = [order.pop(0) for _ in range(count)]
        page_BM[row, :count] = torch.tensor(own, dtype=torch.int32)
        k, v = torch.randn(2, length, num_kv_heads, head_dim, generator=generator).to(dtype)
        for token in range(length):
            key[own[token // page_tokens], :, token % page_tokens] = k[token]
            value[own[token // page_tokens], :, token % page_tokens] = v[token]
        keys.append(k)
        values.append(v)
    return Pool(
        key_PKSD=key.to(device),
        value_PKSD=value.to(device),
        page_BM=page_BM.to(device),
        length_B=torch.tensor(lengths).to(device),
        keys=keys,
        values=values,
    )


def exact(q_BHD: Tensor, pool: Pool) -> Tensor:
    """In float64, a row at a time; zeros of no tokens."""
    o_BHD = torch.zeros(q_BHD.shape, dtype=torch.float64)
    for row, (k_LKD, v_LKD) in enumerate(zip(pool.keys, pool.values, strict=True)):
        if len(k_LKD):
            group = q_BHD.shape[1] // k_LKD.shape[1]
            k, v = (t.double().repeat_interleave(group, 1) for t in (k_LKD, v_LKD))
            q_HD = q_BHD[row].double().cpu()
            weight_HL = torch.softmax(torch.einsum("hd,lhd->hl", q_HD, k) / q_HD.shape[1] ** 0.5, 1)
            o_BHD[row] = torch.einsum("hl,lhd->hd", weight_HL, v)
    return o_BHD


def queries(pool: Pool, num_heads: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    shape = (len(pool.keys), num_heads, pool.key_PKSD.shape[3])
    return torch.randn(shape, generator=generator).to(pool.key_PKSD)


def error_of(got: Tensor, wanted: Tensor) -> float:
    return float((got.double().cpu() - wanted).norm() / wanted.norm())


LENGTHS = [[1], [15], [16], [17], [31, 32, 33], [0], [3, 0, 64, 65, 250, 1], [300, 5]]


@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_torch_attends_to_the_tokens_of_a_row_alone(lengths: list[int], dtype: torch.dtype) -> None:
    pool = filled(lengths, dtype=dtype)
    q_BHD = queries(pool, 4)
    got = paged_decode(q_BHD, pool.key_PKSD, pool.value_PKSD, pool.page_BM, pool.length_B)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact(q_BHD, pool), rtol=0, atol=BARS[dtype])


def test_pages_of_several_layers_may_lie_side_by_side() -> None:
    pool = filled([40, 7])
    q_BHD = queries(pool, 4)
    wanted = exact(q_BHD, pool)
    for layers in (2, 3):
        wide = torch.full((*pool.key_PKSD.shape[:1], layers, *pool.key_PKSD.shape[1:]), torch.nan)
        wide[:, 0], wide[:, 1] = pool.key_PKSD, pool.value_PKSD
        got = paged_decode(q_BHD, wide[:, 0], wide[:, 1], pool.page_BM, pool.length_B)
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-5)


def test_a_callers_output_is_filled_and_given_back() -> None:
    pool = filled([20, 0])
    q_BHD = queries(pool, 4)
    out = torch.full_like(q_BHD, torch.nan)
    got = paged_decode(q_BHD, pool.key_PKSD, pool.value_PKSD, pool.page_BM, pool.length_B, out=out)
    assert got is out
    torch.testing.assert_close(out.double(), exact(q_BHD, pool), rtol=0, atol=1e-5)


def by_triton(q_BHD: Tensor, pool: Pool, num_programs: int | None = 8) -> Tensor:
    from m1serve.kernels import paged_triton

    o_BHD = torch.full_like(q_BHD, torch.nan)
    paged_triton.decode(
        q_BHD,
        pool.key_PKSD,
        pool.value_PKSD,
        pool.page_BM,
        pool.length_B,
        o_BHD,
        num_programs=num_programs,
    )
    return o_BHD


@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_triton_attends_to_the_tokens_of_a_row_alone(
    lengths: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    pool = filled(lengths, dtype=dtype, device=device)
    q_BHD = queries(pool, 4)
    got = by_triton(q_BHD, pool)
    torch.testing.assert_close(got.double().cpu(), exact(q_BHD, pool), rtol=0, atol=BARS[dtype])


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 255, 256, 257, 1025])
@pytest.mark.parametrize("num_programs", [2, 6])
def test_triton_joins_splits_at_their_borders(
    length: int, num_programs: int, device: torch.device
) -> None:
    pool = filled([length, 3], head_dim=16, dtype=torch.float16, device=device, num_kv_heads=1)
    q_BHD = queries(pool, 3)
    got = by_triton(q_BHD, pool, num_programs)
    torch.testing.assert_close(got.double().cpu(), exact(q_BHD, pool), rtol=0, atol=3e-3)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "page_tokens"),
    [(64, 8, 128, 64), (16, 2, 64, 32), (20, 1, 16, 256), (3, 3, 32, 128)],
)
def test_triton_takes_other_shapes(
    num_heads: int, num_kv_heads: int, head_dim: int, page_tokens: int, device: torch.device
) -> None:
    pool = filled(
        [70, 1, 130],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_tokens=page_tokens,
        dtype=torch.float16,
        device=device,
    )
    q_BHD = queries(pool, num_heads)
    got = by_triton(q_BHD, pool)
    torch.testing.assert_close(got.double().cpu(), exact(q_BHD, pool), rtol=0, atol=3e-3)


def test_a_rows_bits_do_not_depend_on_the_others(device: torch.device) -> None:
    together = filled([200, 31, 0, 90], dtype=torch.float16, device=device)
    q_BHD = queries(together, 4)
    all_rows = by_triton(q_BHD, together)
    for row in range(4):
        alone = Pool(
            key_PKSD=together.key_PKSD,
            value_PKSD=together.value_PKSD,
            page_BM=together.page_BM[row : row + 1],
            length_B=together.length_B[row : row + 1],
            keys=together.keys[row : row + 1],
            values=together.values[row : row + 1],
        )
        assert torch.equal(by_triton(q_BHD[row : row + 1], alone), all_rows[row : row + 1])


# the interpreter warns of NaN, which is what is wanted
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_on_a_device_a_wrong_page_gives_nan_and_a_wrong_length_the_table(
    device: torch.device,
) -> None:
    pool = filled([40, 40, 33, 33], device=device)
    q_BHD = queries(pool, 4)
    wanted = by_triton(q_BHD, pool)
    pool.page_BM[0, 1] = -1
    pool.page_BM[1, 2] = pool.key_PKSD.shape[0]
    pool.length_B[3] = -5
    got = by_triton(q_BHD, pool)
    assert bool(got[:2].isnan().all())
    assert torch.equal(got[2], wanted[2])
    assert not bool(got[3].any())
    # the last entry of every row's table is -1
    pool.length_B[2] = 10**10
    assert bool(by_triton(q_BHD, pool)[2].isnan().all())


def test_splits_cover_each_row_once_and_fill_the_device() -> None:
    pytest.importorskip("triton")
    from m1serve.kernels.paged_triton import num_splits

    for length in (1, 128, 129, 4096, 4225, 1 << 20):
        count = num_splits(length, 264, 8, 64)
        tiles = -(-length // 64)
        each = -(-tiles // count)
        assert 1 <= -(-tiles // each) <= count <= 33
    assert num_splits(1 << 20, 264, 8, 64) == 33
    assert num_splits(1024, 264, 8, 64) == 8


def test_pages_beyond_32_bits_of_elements_are_reached(device: torch.device) -> None:
    """A pool of pages that lie far apart: element 2^31 and beyond, in little real memory."""
    if device.type == "cuda":
        pytest.skip("the benchmark's checks hold such a pool on a GPU")
    K, D, apart = 1, 16, (1 << 31) // 3 + 16
    apart -= apart % 16
    storage = torch.empty(4 * apart + K * S * D, dtype=torch.float16)
    key = storage.as_strided((5, K, S, D), (apart, S * D, D, 1))
    k = torch.randn(S, K, D).half()
    key[4] = k.transpose(0, 1)
    pool = Pool(
        key_PKSD=key,
        value_PKSD=key,
        page_BM=torch.tensor([[4]], dtype=torch.int32),
        length_B=torch.tensor([S]),
        keys=[k],
        values=[k],
    )
    q_BHD = queries(pool, 2)
    assert error_of(by_triton(q_BHD, pool), exact(q_BHD, pool)) <= 3e-3
    from m1serve.kernels import paged_copy_triton

    place = torch.tensor([4]), torch.tensor([3])
    paged_copy_triton.store(key, key, k[:1], k[:1], *place)
    assert torch.equal(key[4, :, 3], k[0])
    got = paged_copy_triton.gather(key, torch.tensor([4]), S)
    assert torch.equal(got, key[4])


Store = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]


def triton_store(*tensors: Tensor) -> None:
    from m1serve.kernels import paged_copy_triton

    paged_copy_triton.store(*tensors)


@pytest.mark.parametrize("store", [paged_store, triton_store])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_new_tokens_go_to_their_places_and_nothing_else_changes(
    store: Store, index: torch.dtype, device: torch.device
) -> None:
    pool = filled([40, 3, 17], num_kv_heads=3, dtype=torch.bfloat16, device=device)
    key, value = pool.key_PKSD, pool.value_PKSD
    qkv = torch.randn(4, 9, 32, device=device)
    k, v = qkv[:, 3:6], qkv[:, 6:]
    page = torch.tensor([2, -1, 0, 2], dtype=index, device=device)
    offset = torch.tensor([15, 0, 3, 0], dtype=index, device=device)
    wanted_key, wanted_value = key.clone(), value.clone()
    for n in (0, 2, 3):
        wanted_key[page[n], :, offset[n]] = k[n].bfloat16()
        wanted_value[page[n], :, offset[n]] = v[n].bfloat16()
    store(key, value, k, v, page, offset)
    for got, wanted in ((key, wanted_key), (value, wanted_value)):
        assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))


def test_storing_only_skipped_or_no_tokens_changes_nothing() -> None:
    pool = filled([5])
    before = pool.key_PKSD.clone()
    k = torch.zeros(2, 2, 32)
    skipped = torch.tensor([-1, -1])
    paged_store(pool.key_PKSD, pool.value_PKSD, k, k, skipped, torch.zeros(2).long())
    paged_store(pool.key_PKSD, pool.value_PKSD, k[:0], k[:0], skipped[:0], skipped[:0])
    torch.testing.assert_close(pool.key_PKSD, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 100, 129])
def test_a_prefix_is_gathered_in_order(num_tokens: int, device: torch.device) -> None:
    from m1serve.kernels import paged_copy_triton

    pool = filled([7, 130], device=device)
    wanted = pool.keys[1][:num_tokens].transpose(0, 1)
    pages = pool.page_BM[1].tolist()[: -(-num_tokens // S)]
    gathered = [
        paged_gather(pool.key_PKSD, pages, num_tokens),
        paged_gather(pool.key_PKSD, pool.page_BM[1], num_tokens),
    ]
    if num_tokens:
        gathered.append(paged_copy_triton.gather(pool.key_PKSD, pool.page_BM[1], num_tokens))
    for got in gathered:
        assert got.is_contiguous()
        assert torch.equal(got.cpu(), wanted)


def refused(pool: Pool, **changed: Tensor) -> str:
    arguments = {
        "q_BHD": queries(pool, 4),
        "key_PKSD": pool.key_PKSD,
        "value_PKSD": pool.value_PKSD,
        "page_BM": pool.page_BM,
        "length_B": pool.length_B,
    }
    with pytest.raises(ValueError, match="wanted") as caught:
        paged_decode(**(arguments | changed))
    return str(caught.value)


def test_wrong_arguments_are_named() -> None:
    pool = filled([20, 3])
    assert "q has shape [2, 3, 32]" in refused(pool, q_BHD=torch.zeros(2, 3, 32))
    assert "24 tokens a page" in refused(pool, key_PKSD=torch.zeros(3, 2, 24, 32))
    assert "head_dim is 24" in refused(pool, key_PKSD=torch.zeros(3, 2, 16, 24))
    assert "value has shape" in refused(pool, value_PKSD=pool.value_PKSD[:1])
    assert "torch.int64" in refused(pool, page_BM=pool.page_BM.long())
    assert "length has shape [1]" in refused(pool, length_B=pool.length_B[:1])
    assert "length[1] is 1000" in refused(pool, length_B=torch.tensor([20, 1000]))
    bad = pool.page_BM.clone()
    bad[0, 1] = -1
    assert "a used page is -1" in refused(pool, page_BM=bad)
    with pytest.raises(ValueError, match="pages holds 99"):
        paged_gather(pool.key_PKSD, [99], 3)
    with pytest.raises(ValueError, match="names 1 pages of 16 tokens, wanted 2"):
        paged_gather(pool.key_PKSD, [0], 17)
    k = torch.zeros(1, 2, 32)
    zero = torch.zeros(1).long()
    with pytest.raises(ValueError, match="offset holds 16"):
        paged_store(pool.key_PKSD, pool.value_PKSD, k, k, zero, zero + 16)
    with pytest.raises(ValueError, match="k has shape"):
        paged_store(pool.key_PKSD, pool.value_PKSD, k[:, :1], k, zero, zero)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_step_follows_lengths_pages_and_stored_tokens() -> None:
    device = torch.device("cuda")
    pool = filled([70, 5, 0], dtype=torch.bfloat16, num_kv_heads=8, head_dim=128, page_tokens=64)
    q_BHD = queries(pool, 64).to(device)
    key, value = pool.key_PKSD.to(device), pool.value_PKSD.to(device)
    page_BM, length_B = pool.page_BM.to(device), pool.length_B.to(device)
    place, page_N = torch.zeros(3, 2, dtype=torch.int64, device=device).unbind(1)
    k_NKD, v_NKD = torch.randn(2, 3, 8, 128, device=device).bfloat16()

    def step() -> Tensor:
        paged_store(key, value, k_NKD, v_NKD, page_N.contiguous(), place.contiguous())
        return paged_decode(q_BHD, key, value, page_BM, length_B)

    page_N.fill_(-1)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o_BHD = step()
    graph.replay()
    assert error_of(o_BHD, exact(q_BHD, pool)) <= 6e-3
    # a token more for the first two rows
    page_N.copy_(torch.stack([page_BM[0, 1], page_BM[1, 0], -torch.ones_like(page_BM[0, 0])]))
    place.copy_(torch.tensor([6, 5, 0]))
    length_B[:2] += 1
    graph.replay()
    for row in range(2):
        pool.keys[row] = torch.cat([pool.keys[row], k_NKD[row : row + 1].cpu()])
        pool.values[row] = torch.cat([pool.values[row], v_NKD[row : row + 1].cpu()])
    assert error_of(o_BHD, exact(q_BHD, pool)) <= 6e-3
    assert not bool(o_BHD[2].any())
