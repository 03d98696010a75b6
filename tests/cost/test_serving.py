"""Seconds, memory and dollars of serving and of RL: by hand, and the laws that they obey."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m1serve.cost.machine import H200, H800, Machine
from m1serve.cost.minimax import M1, shape_of
from m1serve.cost.rivals import qwen3, r1_absorbed
from m1serve.cost.rl import RlRun, rl_cost
from m1serve.cost.serving import Timing, Workload, decode_seconds, prefill_seconds, serving_cost
from m1serve.cost.shape import Shape, Storage
from m1serve.errors import ConfigError

BF16 = shape_of(M1, name="MiniMax-M1", storage=Storage(weight_itemsize=2))
M1_SHAPE = shape_of(M1, name="MiniMax-M1", storage=Storage())
MACHINE = Machine(gpu=H200, num_gpus=8, price_per_gpu_hour=3.0)
LOAD = Workload(prompt_tokens=8192, output_tokens=65_536, concurrency=32)
RUN = RlRun(
    prompt_tokens=1024,
    rollout_tokens=20_000,
    group_size=16,
    prompts_per_step=32,
    num_steps=10,
    recomputes=True,
)
shapes = st.sampled_from((M1_SHAPE, r1_absorbed(Storage()), qwen3(Storage())))


def timing_of(shape: Shape, machine: Machine, load: Workload) -> Timing:
    timing = serving_cost(shape, machine, load).timing
    assert timing is not None
    return timing


def test_m1_in_bf16_leaves_room_for_three_million_tokens_on_eight_h200() -> None:
    room = MACHINE.room_bytes - BF16.weight_bytes
    assert room == pytest.approx(125.6e9, rel=1e-3)
    assert room / BF16.kv_token_bytes == pytest.approx(3.07e6, abs=5e3)
    million = replace(LOAD, prompt_tokens=1_000_000, output_tokens=1)
    assert serving_cost(BF16, MACHINE, million).max_sequences == 3


def test_reading_a_million_tokens_takes_82_seconds_with_every_head() -> None:
    flops = BF16.prefill_flops(1_000_000, num_logits=1_000_000)
    assert MACHINE.seconds(flops=flops, moved_bytes=0) == pytest.approx(82, abs=0.5)
    assert prefill_seconds(BF16, MACHINE, 1_000_000) == pytest.approx(81.1, abs=0.1)


def test_a_lone_token_takes_what_its_bytes_take() -> None:
    whole = replace(MACHINE, bandwidth_share=1.0)
    for shape, context, low, high in (
        (BF16, 1024, 2.45, 2.55),
        (BF16, 1_000_000, 3.45, 3.55),
        (M1_SHAPE, 1024, 1.2, 1.3),
    ):
        moved = shape.decode_bytes(context, batch=1)
        seconds = whole.seconds(flops=shape.decode_flops(context), moved_bytes=moved)
        assert low < 1e3 * seconds < high


def test_bf16_does_not_fit_on_eight_h800_and_says_so() -> None:
    cost = serving_cost(BF16, replace(MACHINE, gpu=H800), LOAD)
    assert cost.room_bytes < 0
    assert (cost.max_sequences, cost.timing, cost.full_timing) == (0, None, None)
    run = rl_cost(BF16, replace(MACHINE, gpu=H800), RUN)
    assert (run.sampling_gpu_hours, run.gpu_hours, run.dollars) == (None, None, None)
    assert run.training_gpu_hours > 0


def test_a_batch_is_no_larger_than_what_fits() -> None:
    cost = serving_cost(M1_SHAPE, MACHINE, replace(LOAD, concurrency=10**6))
    assert cost.timing is not None
    assert cost.timing.batch == cost.max_sequences
    assert cost.timing == cost.full_timing
    assert cost.max_sequences * cost.sequence_bytes <= cost.room_bytes
    assert (cost.max_sequences + 1) * cost.sequence_bytes > cost.room_bytes


def test_decode_bound_by_bytes_is_the_sum_of_its_steps() -> None:
    load = Workload(prompt_tokens=1000, output_tokens=2560, concurrency=1)
    steps = (
        MACHINE.seconds(
            flops=M1_SHAPE.decode_flops(1000 + i),
            moved_bytes=M1_SHAPE.decode_bytes(1000 + i, batch=1),
        )
        for i in range(1, 2561)
    )
    assert decode_seconds(M1_SHAPE, MACHINE, load, batch=1) == pytest.approx(sum(steps), rel=1e-5)


@given(shapes, st.integers(1, 32), st.integers(1, 100_000))
def test_dollars_are_gpu_hours_at_their_price(shape: Shape, batch: int, output: int) -> None:
    load = Workload(prompt_tokens=4096, output_tokens=output, concurrency=batch)
    timing = timing_of(shape, MACHINE, load)
    assert timing.dollars == pytest.approx(3.0 * timing.gpu_hours)
    doubled = timing_of(shape, replace(MACHINE, price_per_gpu_hour=6.0), load)
    assert doubled.dollars == pytest.approx(2 * timing.dollars)
    by_token = (
        4096 * timing.dollars_per_million_prompt_tokens
        + output * timing.dollars_per_million_output_tokens
    )
    assert by_token / 1e6 == pytest.approx(timing.dollars)


@given(shapes, st.integers(1, 31))
def test_a_fuller_batch_is_slower_a_step_and_cheaper_a_token(shape: Shape, batch: int) -> None:
    thin, full = (
        timing_of(shape, MACHINE, replace(LOAD, concurrency=count)) for count in (batch, batch + 1)
    )
    assert full.step_ms > thin.step_ms
    assert full.dollars_per_million_output_tokens < thin.dollars_per_million_output_tokens


@given(shapes, st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_twice_the_shares_are_half_the_time(shape: Shape, mfu: float, bandwidth: float) -> None:
    slow = replace(MACHINE, mfu=mfu, bandwidth_share=bandwidth)
    fast = replace(MACHINE, mfu=2 * mfu, bandwidth_share=2 * bandwidth)
    slow_timing, fast_timing = timing_of(shape, slow, LOAD), timing_of(shape, fast, LOAD)
    assert slow_timing.dollars == pytest.approx(2 * fast_timing.dollars)
    assert slow_timing.is_bound_by_bytes == fast_timing.is_bound_by_bytes


def test_a_run_is_its_rollouts_sampled_and_three_or_four_forwards() -> None:
    cost = rl_cost(M1_SHAPE, MACHINE, RUN)
    num_rollouts = 16 * 32 * 10
    forward = M1_SHAPE.prefill_flops(21_024, num_logits=20_000)
    sampling = M1_SHAPE.prefill_flops(1024) + M1_SHAPE.generation_flops(20_000, prompt_tokens=1024)
    assert cost.num_rollouts == num_rollouts
    assert cost.sampled_tokens == num_rollouts * 20_000
    assert cost.sampling_flops == num_rollouts * sampling
    assert cost.training_flops == 4 * num_rollouts * forward
    assert cost.training_flops_if_kept == 3 * num_rollouts * forward
    hours = 4 * num_rollouts * forward / (989e12 * 0.4) / 3600
    assert cost.training_gpu_hours == pytest.approx(hours)
    kept = rl_cost(M1_SHAPE, MACHINE, replace(RUN, recomputes=False))
    assert kept.training_flops == cost.training_flops_if_kept
    assert kept.sampling_gpu_hours == cost.sampling_gpu_hours


@given(shapes, st.integers(1, 50))
def test_a_longer_run_costs_in_proportion(shape: Shape, num_steps: int) -> None:
    one, many = (rl_cost(shape, MACHINE, replace(RUN, num_steps=n)) for n in (1, num_steps))
    assert many.training_flops == num_steps * one.training_flops
    assert one.dollars is not None
    assert many.dollars == pytest.approx(num_steps * one.dollars)


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("mfu", 0.0, "above 0 and up to 1"),
        ("mfu", 1.5, "above 0 and up to 1"),
        ("bandwidth_share", float("nan"), "above 0 and up to 1"),
        ("num_gpus", 0, "at least 1"),
        ("price_per_gpu_hour", -1.0, "wanted 0 up"),
        ("price_per_gpu_hour", float("inf"), "wanted 0 up"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(field: str, value: float, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        replace(MACHINE, **{field: value})


@pytest.mark.parametrize("field", ["prompt_tokens", "output_tokens", "concurrency"])
def test_a_load_of_nothing_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        replace(LOAD, **{field: 0})


@pytest.mark.parametrize("field", ["group_size", "prompts_per_step", "num_steps"])
def test_a_run_of_nothing_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} is 0"):
        replace(RUN, **{field: 0})
