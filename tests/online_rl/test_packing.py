"""Minibatches of whole groups, microbatches with shared prefixes, and their exact gradient."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m1serve.config import TrainSettings
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.online_rl.cispo import cispo_loss
from m1serve.online_rl.forward import token_streams, token_versions, trained_logprobs
from m1serve.online_rl.learner import Learner
from m1serve.online_rl.packing import (
    MIN_SHARED_TOKENS,
    Microbatch,
    Row,
    pack_microbatches,
    split_minibatches,
)
from m1serve.online_rl.parity import main_version, measure_mismatch
from m1serve.online_rl.samples import Group, Sample

Sampler = Callable[..., tuple[list[int], list[float]]]


def make_sample(
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    logprobs: Sequence[float] | None = None,
    advantage: float = 1.0,
    version: str = "nano@0",
) -> Sample:
    num = len(completion)
    return Sample(
        trajectory_id="x",
        group="g",
        advantage=advantage,
        token_ids=(*prompt, *completion),
        is_trained=(*[False] * len(prompt), *[True] * num),
        logprobs=(*[math.nan] * len(prompt), *(logprobs or [-1.0] * num)),
        versions=(*[""] * len(prompt), *[version] * num),
    )


def make_rows(samples: Sequence[Sample]) -> list[Row]:
    return [Row(sample=s, norm=0.01) for s in samples]


def group(key: str, *lengths: int) -> Group:
    return Group(key=key, samples=tuple(make_sample([1, 2], [3] * n) for n in lengths))


def test_minibatches_hold_whole_groups_and_nearly_equal_numbers() -> None:
    groups = [group(str(i), 1, 2) for i in range(5)]
    minibatches = split_minibatches(groups, 2)
    assert [len(rows) for rows in minibatches] == [4, 6]
    assert len(split_minibatches(groups, 8)) == 5


def test_norm_is_the_groups_tokens_times_the_groups() -> None:
    rows = split_minibatches([group("a", 1, 3), group("b", 6)], 1)[0]
    assert [r.norm for r in rows] == pytest.approx([1 / 8, 1 / 8, 1 / 12])


SYSTEM = list(range(100, 200))


def test_a_common_system_prompt_runs_once() -> None:
    rows = make_rows([make_sample([*SYSTEM, i], [7, 8]) for i in range(6)])
    (micro,) = pack_microbatches(rows, max_rows=32)
    assert micro.prefix_length == len(SYSTEM)
    assert micro.num_tokens == 100 + 6 * 3


def test_attempts_at_one_prompt_share_it_up_to_the_predicting_token() -> None:
    rows = make_rows([make_sample(SYSTEM, [7, i]) for i in range(4)])
    (micro,) = pack_microbatches(rows, max_rows=32)
    assert micro.prefix_length == len(SYSTEM) - 1


def test_different_prefixes_go_to_different_microbatches() -> None:
    other = [t + 200 for t in SYSTEM]
    rows = make_rows([make_sample([*p, i], [7]) for i in range(5) for p in (SYSTEM * 2, other * 2)])
    micros = pack_microbatches(rows, max_rows=32)
    assert [m.prefix_length for m in micros] == [200, 200]
    assert [len(m.rows) for m in micros] == [5, 5]


def test_short_or_lonely_prefixes_are_not_shared() -> None:
    short = SYSTEM[: MIN_SHARED_TOKENS - 1]
    rows = make_rows([make_sample([*short, i], [7]) for i in range(4)])
    assert [m.prefix_length for m in pack_microbatches(rows, max_rows=32)] == [0]
    (lonely,) = pack_microbatches(rows[:1], max_rows=32)
    assert lonely.prefix_length == 0


def test_microbatches_are_sorted_by_length() -> None:
    rows = make_rows([make_sample([1, 2], [7] * n) for n in (9, 1, 5, 3)])
    micros = pack_microbatches(rows, max_rows=2)
    assert [[len(r.sample.token_ids) for r in m.rows] for m in micros] == [[3, 5], [7, 11]]


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6)


@given(
    st.lists(st.tuples(st.integers(0, 2), prompts, st.integers(1, 4)), min_size=1, max_size=12),
    st.integers(1, 5),
)
@settings(max_examples=100, deadline=None)
def test_packing_keeps_every_row_and_never_shares_what_is_trained(
    shapes: list[tuple[int, list[int], int]], max_rows: int
) -> None:
    samples = [make_sample([k + 5] * 40 * k + p, [9] * n) for k, p, n in shapes]
    rows = make_rows(samples)
    micros = pack_microbatches(rows, max_rows)
    packed = Counter(id(r) for m in micros for r in m.rows)
    assert packed == Counter(id(r) for r in rows)
    for micro in micros:
        assert len(micro.rows) <= max_rows
        prefixes = {r.sample.token_ids[: micro.prefix_length] for r in micro.rows}
        assert len(prefixes) == 1
        for row in micro.rows:
            # the token before the first trained one must run with the row
            assert micro.prefix_length < row.sample.is_trained.index(True)


def gradients(model: M1ForCausalLM, micros: Sequence[Microbatch]) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    for micro in micros:
        logp_N = trained_logprobs(model, micro)
        seen = token_streams(micro)
        loss = cispo_loss(
            logp_N, seen.sampler_logp_N, seen.advantage_N, seen.norm_N, weight_max=5.0
        )
        torch.autograd.backward(loss)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_a_shared_prefix_gives_the_plain_gradient(model: M1ForCausalLM, sample: Sampler) -> None:
    rows = []
    for i in range(5):
        prompt = [*(t % 97 for t in SYSTEM), 3 + i, 11]
        completion, logprobs = sample(model, prompt, 3 + i, seed=i)
        shifted = [lp - 0.3 * (i % 2) for lp in logprobs]
        rows.append(
            Row(
                sample=make_sample(prompt, completion, logprobs=shifted, advantage=(-1.0) ** i),
                norm=0.05,
            )
        )
    shared = pack_microbatches(rows, max_rows=8)
    assert shared[0].prefix_length == 100
    plain = [Microbatch(rows=(row,), prefix_length=0) for row in rows]
    mine, wanted = gradients(model, shared), gradients(model, plain)
    assert mine.keys() == wanted.keys()
    for name, gradient in wanted.items():
        scale = gradient.abs().max()
        torch.testing.assert_close(mine[name] / scale, gradient / scale, rtol=0, atol=2e-5)


def test_trainer_and_sampler_agree_on_the_samplers_own_tokens(
    model: M1ForCausalLM, sample: Sampler
) -> None:
    prompt = [t % 97 for t in SYSTEM]
    rows = [
        Row(sample=make_sample([*prompt, i], ids, logprobs=logprobs), norm=0.1)
        for i in range(3)
        for ids, logprobs in [sample(model, [*prompt, i], 9, seed=i)]
    ]
    mismatch = measure_mismatch(model, rows, weights_version="nano@0", max_rows=8)
    assert mismatch.num_tokens == 27
    assert mismatch.mean < 1e-5
    assert mismatch.max < 1e-4
    assert abs(mismatch.kl) < 1e-6


def test_tokens_of_another_version_are_not_compared(model: M1ForCausalLM, sample: Sampler) -> None:
    ids, logprobs = sample(model, [1, 2, 3], 5, seed=0)
    rows = make_rows(
        [
            make_sample([1, 2, 3], ids, logprobs=logprobs, version="nano@1"),
            make_sample([1, 2, 3], ids, logprobs=[-50.0] * 5, version="nano@0"),
        ]
    )
    mismatch = measure_mismatch(model, rows, weights_version="nano@1", max_rows=8)
    assert mismatch.num_tokens == 5
    assert mismatch.max < 1e-4
    assert main_version(rows, preferred="nano@1") == "nano@1"
    assert main_version(rows[1:], preferred="nano@1") == "nano@0"


def test_streams_follow_the_order_of_the_logprobs() -> None:
    rows = [
        Row(sample=make_sample([1], [2, 3], logprobs=[-1, -2], advantage=2.0), norm=0.5),
        Row(sample=make_sample([1], [4], logprobs=[-3], advantage=-1.0, version="b@1"), norm=0.25),
    ]
    micro = Microbatch(rows=tuple(rows), prefix_length=0)
    seen = token_streams(micro)
    assert seen.sampler_logp_N.tolist() == [-1, -2, -3]
    assert seen.advantage_N.tolist() == [2, 2, -1]
    assert seen.norm_N.tolist() == [0.5, 0.5, 0.25]
    assert token_versions(micro) == ["nano@0", "nano@0", "b@1"]


def test_a_step_raises_what_was_rewarded_and_resumes_bit_for_bit(
    model: M1ForCausalLM, sample: Sampler, tiny_dir: object
) -> None:
    prompt = [t % 97 for t in SYSTEM]
    rows = []
    for i, advantage in enumerate((1.0, -1.0)):
        ids, logprobs = sample(model, prompt, 6, seed=i)
        rows.append(
            Row(sample=make_sample(prompt, ids, logprobs=logprobs, advantage=advantage), norm=0.1)
        )
    learner = Learner(model, TrainSettings(lr=1e-3))
    first = learner.train_minibatch(rows)
    saved, meta = {n: t.clone() for n, t in learner.tensors().items()}, learner.meta()
    second = learner.train_minibatch(rows)
    change = second.logp_N - first.logp_N
    gain = (change * first.streams.advantage_N).sum()
    assert gain > 0
    assert 0 < first.grad_min <= first.grad_max
    other = Learner(M1ForCausalLM(model.config), TrainSettings(lr=1e-3))
    other.restore(saved, meta)
    assert other.num_steps == 1
    again = other.train_minibatch(rows)
    assert torch.equal(again.logp_N, second.logp_N)
    for name, parameter in learner.model.named_parameters():
        assert torch.equal(dict(other.model.named_parameters())[name], parameter), name


def test_gradients_far_below_the_usual_epsilon_still_take_a_whole_step(
    model: M1ForCausalLM, sample: Sampler
) -> None:
    """M1 saw 1e-18 to 1e-5; AdamW's default epsilon of 1e-8 would stand still."""
    prompt = [t % 97 for t in SYSTEM]
    ids, logprobs = sample(model, prompt, 6, seed=0)
    rows = [Row(sample=make_sample(prompt, ids, logprobs=logprobs), norm=1e-11)]
    before = model.lm_head.weight.detach().clone()
    step = Learner(model, TrainSettings(lr=1e-3)).train_minibatch(rows)
    assert step.grad_max < 1e-9
    moved = (model.lm_head.weight - before).abs()
    assert moved.max().item() == pytest.approx(1e-3, rel=1e-2)


def test_negated_advantages_push_the_other_way(model: M1ForCausalLM, sample: Sampler) -> None:
    prompt = [t % 97 for t in SYSTEM]
    ids, logprobs = sample(model, prompt, 6, seed=0)
    rows = [Row(sample=make_sample(prompt, ids, logprobs=logprobs), norm=0.1)]
    learner = Learner(model, TrainSettings(lr=1e-3, negate_advantages=True))
    before = learner.train_minibatch(rows).logp_N.sum()
    assert learner.train_minibatch(rows).logp_N.sum() < before
