"""The shapes against hand-computed figures, and the laws that every shape's costs obey."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m1serve.cost.minimax import M1, SLICE, shape_of
from m1serve.cost.rivals import qwen3, r1_absorbed, r1_expanded
from m1serve.cost.shape import Shape, Storage
from m1serve.model.config import M1Config

DATA = Path(__file__).parents[3] / "shared" / "data" / "m1"
BF16 = Storage(weight_itemsize=2, kv_itemsize=2)
M1_SHAPE = shape_of(M1, name="MiniMax-M1", storage=BF16)
SHAPES = (M1_SHAPE, r1_expanded(BF16), r1_absorbed(BF16), qwen3(BF16))

shapes = st.sampled_from(SHAPES)
lengths = st.integers(1, 300_000)


def test_m1_is_the_model_of_its_config_json() -> None:
    if not DATA.is_dir():
        pytest.skip(f"MiniMax's reference data is not at {DATA}")
    assert M1Config.from_dict(json.loads((DATA / "config.json").read_text())) == M1


def test_m1_by_hand() -> None:
    assert M1_SHAPE.num_params == 456_089_655_296
    assert M1_SHAPE.weight_bytes == 912_210_767_872
    assert M1_SHAPE.kv_token_bytes == 40_960
    assert M1_SHAPE.state_bytes == 280 * 2**20 == 7168 * M1_SHAPE.kv_token_bytes
    assert M1_SHAPE.body_flops + M1_SHAPE.head_flops == pytest.approx(94.3e9, rel=1e-3)
    assert M1_SHAPE.decode_state_flops == pytest.approx(0.37e9, rel=1e-2)
    assert M1_SHAPE.decode_flops(1000) - M1_SHAPE.decode_flops(0) == 327_680 * 1000


def test_the_slice_has_a_tenth_of_m1s_state_and_a_tenth_of_its_softmax() -> None:
    piece = shape_of(SLICE, name="slice", storage=BF16)
    assert 10 * piece.state_bytes == M1_SHAPE.state_bytes
    assert 10 * piece.kv_token_bytes == M1_SHAPE.kv_token_bytes
    assert 10 * piece.decode_key_flops == M1_SHAPE.decode_key_flops
    assert piece.weight_bytes == pytest.approx(91e9, rel=0.01)


def test_deepseek_r1_by_hand() -> None:
    expanded, absorbed = SHAPES[1], SHAPES[2]
    assert expanded.num_params == pytest.approx(671.0e9, rel=1e-4)
    assert expanded.decode_flops(0) == pytest.approx(73.2e9, rel=1e-3)
    assert expanded.decode_key_flops == 61 * 128 * 2 * (192 + 128) == 4_997_120
    assert absorbed.decode_key_flops == 61 * 128 * 2 * (576 + 512) == 16_990_208
    assert absorbed.kv_token_bytes == 70_272
    assert expanded.kv_token_bytes == 61 * 128 * (192 + 128) * 2
    assert expanded.decode_flops(0) == absorbed.decode_flops(0)
    assert expanded.prefill_flops(5000) == absorbed.prefill_flops(5000)


def test_qwen3_by_hand() -> None:
    shape = SHAPES[3]
    assert shape.num_params == pytest.approx(235.09e9, rel=1e-4)
    assert shape.decode_flops(0) == pytest.approx(43.1e9, rel=1e-3)
    assert shape.decode_key_flops == 94 * 4 * 64 * 128
    assert shape.kv_token_bytes == 94 * 2 * 4 * 128 * 2


@pytest.mark.parametrize(
    ("num_tokens", "m1", "expanded", "absorbed"),
    [
        (16_384, 100.1, 155.1, 351.6),
        (32_768, 105.4, 237.0, 630.0),
        (65_536, 116.2, 400.7, 1186.7),
        (100_000, 127.5, 573.0, 1772.3),
        (131_072, 137.7, 728.2, 2300.2),
        (1_000_000, 422.4, 5070.4, 17063.5),
    ],
)
def test_gigaflops_of_a_token(num_tokens: int, m1: float, expanded: float, absorbed: float) -> None:
    computed = [shape.decode_flops(num_tokens) / 1e9 for shape in SHAPES[:3]]
    assert computed == pytest.approx([m1, expanded, absorbed], abs=0.051)


def test_a_step_of_one_sequence_moves_the_bytes_of_what_it_meets() -> None:
    # bf16: 47.17 B parameters but the embedding, the cache, the state both ways
    for context, gigabytes in ((1024, 95.0), (65_536, 97.6), (1_000_000, 135.9)):
        moved = M1_SHAPE.decode_bytes(context, batch=1)
        assert moved == pytest.approx(gigabytes * 1e9, rel=1e-3)


@given(shapes, lengths, st.integers(0, 300_000))
def test_longer_costs_more(shape: Shape, num_tokens: int, prompt: int) -> None:
    assert shape.decode_flops(num_tokens + 1) > shape.decode_flops(num_tokens)
    assert shape.prefill_flops(num_tokens + 1) > shape.prefill_flops(num_tokens)
    assert shape.sequence_bytes(num_tokens + 1) > shape.sequence_bytes(num_tokens)
    behind = shape.generation_flops(num_tokens, prompt_tokens=prompt)
    assert behind >= shape.generation_flops(num_tokens)
    assert shape.generation_flops(num_tokens + 1, prompt_tokens=prompt) > behind


@given(shapes, lengths, lengths, st.integers(0, 100_000))
def test_generations_add_up(shape: Shape, first: int, second: int, prompt: int) -> None:
    whole = shape.generation_flops(first + second, prompt_tokens=prompt)
    begun = shape.generation_flops(first, prompt_tokens=prompt)
    assert whole == begun + shape.generation_flops(second, prompt_tokens=prompt + first)


@given(shapes, st.integers(1, 300), st.integers(0, 1000))
def test_a_generation_is_the_sum_of_its_tokens(shape: Shape, num_tokens: int, prompt: int) -> None:
    tokens = (shape.decode_flops(prompt + i + 1) for i in range(num_tokens))
    assert shape.generation_flops(num_tokens, prompt_tokens=prompt) == sum(tokens)


@given(shapes, lengths)
def test_a_generation_is_the_integral_of_its_tokens(shape: Shape, num_tokens: int) -> None:
    # the trapezoid is exact for a line; tokens attend to themselves, hence half a key more each
    mean = (shape.decode_flops(0) + shape.decode_flops(num_tokens)) / 2
    half_keys = shape.decode_key_flops * num_tokens / 2
    assert shape.generation_flops(num_tokens) == pytest.approx(mean * num_tokens + half_keys)


@given(shapes, lengths)
def test_prefill_is_a_generation_but_for_heads_and_chunks(shape: Shape, num_tokens: int) -> None:
    same_keys = replace(
        shape,
        decode_key_flops=shape.prefill_key_flops,
        decode_state_flops=shape.prefill_state_flops,
    )
    prefill = shape.prefill_flops(num_tokens, num_logits=num_tokens)
    assert prefill == same_keys.generation_flops(num_tokens)
    saved = (num_tokens - 1) * shape.head_flops
    assert shape.prefill_flops(num_tokens) == prefill - saved


@given(shapes, st.integers(1, 10_000))
def test_a_batch_meets_more_experts_and_never_more_than_there_are(shape: Shape, batch: int) -> None:
    assert shape.experts_touched(1) == pytest.approx(shape.num_experts_per_tok)
    assert shape.experts_touched(batch) <= shape.num_experts
    assert shape.experts_touched(batch + 1) >= shape.experts_touched(batch)
    assert shape.step_weight_bytes(batch) <= shape.weight_bytes - shape.embedding_bytes
    assert shape.experts_touched(batch) <= batch * shape.num_experts_per_tok * (1 + 1e-9)


def test_equal_costs_are_where_the_curves_cross() -> None:
    for rival in SHAPES[1:3]:
        context, length = M1_SHAPE.equal_context(rival), M1_SHAPE.equal_generation(rival)
        for n, sign in ((int(context) - 1, 1), (int(context) + 2, -1)):
            assert sign * (M1_SHAPE.decode_flops(n) - rival.decode_flops(n)) > 0
        for n, sign in ((int(length) - 1, 1), (int(length) + 2, -1)):
            assert sign * (M1_SHAPE.generation_flops(n) - rival.generation_flops(n)) > 0


def test_m1_costs_more_than_r1_below_four_and_a_half_thousand_tokens() -> None:
    expanded, absorbed = SHAPES[1], SHAPES[2]
    assert M1_SHAPE.equal_context(expanded) == pytest.approx(4600, rel=2e-2)
    assert M1_SHAPE.equal_context(absorbed) == pytest.approx(1300, rel=2e-2)
    assert M1_SHAPE.equal_generation(expanded) == pytest.approx(9200, rel=2e-2)
    assert M1_SHAPE.equal_generation(absorbed) == pytest.approx(2600, rel=2e-2)
    assert M1_SHAPE.decode_flops(0) > expanded.decode_flops(0)
    assert M1_SHAPE.equal_context(SHAPES[3]) == pytest.approx(18_738, abs=1)


def test_what_never_becomes_cheaper_never_crosses() -> None:
    assert SHAPES[2].equal_context(SHAPES[1]) == float("inf")
    assert SHAPES[2].equal_context(M1_SHAPE) == float("inf")
    cheaper = replace(M1_SHAPE, body_flops=0)
    assert cheaper.equal_context(M1_SHAPE) == 0
    assert M1_SHAPE.equal_context(M1_SHAPE) == float("inf")
