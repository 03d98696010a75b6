"""One forward for training, prefill and decode: any way to cut a sequence gives equal logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from m1serve.kernels.decay import slopes
from m1serve.model.checkpoint import disk_views
from m1serve.model.config import M1Config
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.lightning import LightningAttention
from m1serve.model.state import SequenceState
from m1serve.model.tiny import random_model, tiny_config


def token_ids(num_rows: int, num_tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 128, (num_rows, num_tokens), generator=generator)


def gap(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@torch.no_grad()
def test_minimaxs_own_code_gives_the_same_logits(m1_data: Path) -> None:
    golden = torch.load(m1_data / "golden_tiny.pt", weights_only=True)
    alpha = 3.5565588200778455
    config = replace(
        tiny_config(512),
        hidden_size=128,
        num_attention_heads=8,
        rope_theta=1e7,
        intermediate_size=96,
        layernorm_full_attention_alpha=alpha,
        layernorm_linear_attention_alpha=alpha,
        layernorm_mlp_alpha=alpha,
    )
    model = M1ForCausalLM(config).eval()
    views = disk_views(model)
    assert views.keys() == golden["sd"].keys()
    for name, view in views.items():
        view.copy_(golden["sd"][name])
    assert gap(model(golden["ids"][:1])[0], golden["full"][0]) < 2e-5
    assert gap(model(golden["ids"][1:, 37:]), golden["solo"]) < 2e-5


@torch.no_grad()
def test_token_by_token_equals_the_chunked_forward(model: M1ForCausalLM) -> None:
    ids = token_ids(3, 150)
    pool = SequenceState.allocate(model.config, 3, 160)
    outputs = [model.hidden(ids[:, t : t + 1], pool)[0] for t in range(150)]
    assert gap(model.logits(torch.cat(outputs, 1)), model(ids)) < 2e-5
    assert pool.length_B.tolist() == [150] * 3


@pytest.mark.parametrize("cuts", [(1,), (64,), (1, 2, 90), (30, 31, 100)])
@pytest.mark.parametrize("is_pooled", [False, True])
@torch.no_grad()
def test_any_split_gives_the_same_logits(
    model: M1ForCausalLM, cuts: tuple[int, ...], is_pooled: bool
) -> None:
    ids = token_ids(2, 130)
    state = SequenceState.allocate(model.config, 2, 130) if is_pooled else SequenceState.empty(2)
    outputs = []
    for start, end in zip((0, *cuts), (*cuts, 130), strict=True):
        hidden, state = model.hidden(ids[:, start:end], state)
        outputs.append(hidden)
    assert gap(model.logits(torch.cat(outputs, 1)), model(ids)) < 2e-5


@pytest.mark.parametrize("is_pooled", [False, True])
@torch.no_grad()
def test_shared_prefix_then_ragged_prefill_then_decode(
    model: M1ForCausalLM, is_pooled: bool
) -> None:
    prefix = token_ids(1, 40)[0]
    tails = [token_ids(1, n, seed=n)[0] for n in (71, 6, 34)]
    counts = torch.tensor([len(tail) - 1 for tail in tails])
    padded = torch.zeros(3, 70, dtype=torch.int64)
    for row, tail in enumerate(tails):
        padded[row, : len(tail) - 1] = tail[:-1]
    wanted = [model(torch.cat([prefix, tail])[None])[0] for tail in tails]

    _, state = model.hidden(prefix[None])
    state = state.expand(3)
    if is_pooled:
        state = state.with_capacity(112)
    hidden, state = model.hidden(padded, state, counts)
    last = model.logits(hidden[torch.arange(3), counts - 1])
    final = torch.stack([tail[-1:] for tail in tails])
    decoded = model.logits(model.hidden(final, state)[0])[:, 0]
    for row in range(3):
        assert gap(last[row], wanted[row][-2]) < 2e-5
        assert gap(decoded[row], wanted[row][-1]) < 2e-5


@torch.no_grad()
def test_padding_beyond_the_capacity_is_never_written(model: M1ForCausalLM) -> None:
    ids = token_ids(2, 20)
    pool = SequenceState.allocate(model.config, 2, 20)
    model.hidden(ids[:, :18], pool)
    hidden, _ = model.hidden(ids[:, 15:20], pool, torch.tensor([2, 0]))
    assert pool.length_B.tolist() == [20, 18]
    wanted = model(torch.cat([ids[:1, :18], ids[:1, 15:17]], 1))
    assert gap(model.logits(hidden[0, 1]), wanted[0, -1]) < 2e-5


@torch.no_grad()
def test_rows_without_a_token_keep_their_state_in_a_decode_step(model: M1ForCausalLM) -> None:
    ids = token_ids(2, 12)
    pool = SequenceState.allocate(model.config, 2, 20)
    model.hidden(ids[:, :10], pool)
    model.hidden(ids[:, 10:11], pool, torch.tensor([1, 0]))
    hidden, _ = model.hidden(ids[:, 10:11], pool)
    assert gap(model.logits(hidden[1, 0]), model(ids[1:, :11])[0, -1]) < 2e-5


def test_a_growing_state_is_not_modified_by_a_forward(model: M1ForCausalLM) -> None:
    ids = token_ids(2, 30)
    _, state = model.hidden(ids[:, :20])
    before = {i: t.clone() for i, t in state.lightning.items()}
    for counts in (None, torch.tensor([1, 0])):
        model.hidden(ids[:, 20:], state, counts)
        model.hidden(ids[:, 20:21], state, counts)
    assert state.length_B.tolist() == [20, 20]
    assert all(torch.equal(t, state.lightning[i]) for i, t in before.items())
    assert all(t.shape[2] == 20 for t in (*state.keys.values(), *state.values.values()))


def test_gradients_through_a_shared_prefix_are_the_plain_ones(model: M1ForCausalLM) -> None:
    prefix, tails = token_ids(1, 40), token_ids(3, 50, seed=1)
    plain = model.hidden(torch.cat([prefix.expand(3, -1), tails], 1))[0][:, 40:]
    _, state = model.hidden(prefix)
    shared = model.hidden(tails, state.expand(3))[0]
    grads = []
    for hidden in (plain, shared):
        loss = torch.log_softmax(model.logits(hidden), -1)[..., 0].sum()
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    for got, wanted in zip(*grads, strict=True):
        assert gap(got, wanted) <= 2e-5 * wanted.abs().max().item()


def test_gradients_flow_through_single_token_steps(model: M1ForCausalLM) -> None:
    ids = token_ids(2, 6)
    outputs, state = [], SequenceState.empty(2)
    for t in range(6):
        hidden, state = model.hidden(ids[:, t : t + 1], state)
        outputs.append(hidden)
    grads = [
        torch.autograd.grad(hidden.square().sum() + hidden.sum(), list(model.parameters())[:-1])
        for hidden in (torch.cat(outputs, 1).sin(), model.hidden(ids)[0].sin())
    ]
    for got, wanted in zip(*grads, strict=True):
        assert gap(got, wanted) <= 2e-5 * max(wanted.abs().max().item(), 1e-3)


def test_the_residual_is_the_normalised_input_and_every_factor_counts(config: M1Config) -> None:
    ids = token_ids(1, 20)
    plain = random_model(config)(ids)
    for change in (
        {"postnorm": False},
        {"layernorm_full_attention_alpha": 1.5},
        {"layernorm_full_attention_beta": 0.5},
        {"layernorm_linear_attention_alpha": 1.5},
        {"layernorm_linear_attention_beta": 0.5},
        {"layernorm_mlp_alpha": 1.5},
        {"layernorm_mlp_beta": 0.5},
    ):
        changed = random_model(replace(config, **change))(ids)  # type: ignore[arg-type]
        assert gap(plain, changed) > 1e-3, change


def test_only_the_first_channels_rotate(config: M1Config) -> None:
    ids = token_ids(1, 20)
    full = replace(config, rotary_dim=config.head_dim)
    assert gap(random_model(config)(ids), random_model(full)(ids)) > 1e-3


def test_logits_are_fp32_and_the_router_too_in_a_bf16_model(model: M1ForCausalLM) -> None:
    ids = token_ids(2, 70)
    wanted = model(ids)
    model.to(torch.bfloat16)
    for block in model.blocks:
        block.block_sparse_moe.gate.float()
    with torch.no_grad():
        _, state = model.hidden(ids[:, :69])
        pool = state.with_capacity(80)
        logits = model.logits(model.hidden(ids[:, 69:], pool)[0])
    assert logits.dtype == torch.float32
    assert all(t.dtype == torch.float32 for t in pool.lightning.values())
    assert (logits[:, 0] - wanted[:, -1]).abs().mean() < 0.1


def test_a_cast_of_the_model_never_rounds_the_decay(model: M1ForCausalLM) -> None:
    attention = model.to(torch.bfloat16).blocks[0].self_attn
    assert isinstance(attention, LightningAttention)
    assert torch.equal(attention.slopes_on(torch.device("cpu")), slopes(4, 4, 0))


def test_token_logprobs_are_log_softmax_of_the_logits(model: M1ForCausalLM) -> None:
    ids = token_ids(2, 20)
    hidden, _ = model.hidden(ids[:, :-1])
    wanted = torch.log_softmax(model.logits(hidden), -1).gather(-1, ids[:, 1:, None]).flatten()
    got = model.token_logprobs(hidden.flatten(0, 1), ids[:, 1:].flatten()).logprob_T
    assert gap(got, wanted) < 1e-6
    by_fused, by_plain = (torch.autograd.grad(t.sum(), hidden)[0] for t in (got, wanted))
    assert gap(by_fused, by_plain) < 1e-5


def test_a_model_that_served_can_be_trained(model: M1ForCausalLM) -> None:
    ids = token_ids(2, 20)
    with torch.inference_mode():
        model(ids)
        model(ids[:, :1])
    model(ids).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@torch.no_grad()
def test_a_gpu_gives_the_logits_of_the_cpu(model: M1ForCausalLM) -> None:
    ids = token_ids(3, 100)
    wanted = model(ids)
    model.cuda()
    hidden, state = model.hidden(ids[:, :99].cuda())
    last, _ = model.hidden(ids[:, 99:].cuda(), state.with_capacity(128))
    assert gap(model.logits(torch.cat([hidden, last], 1)).cpu(), wanted) < 1e-3


@torch.no_grad()
def test_a_bf16_key_buffer_serves_a_bf16_model(config: M1Config) -> None:
    model = random_model(config).to(torch.bfloat16)
    pool = SequenceState.allocate(config, 2, 16, dtype=torch.bfloat16)
    hidden, _ = model.hidden(token_ids(2, 9), pool)
    assert hidden.dtype == torch.bfloat16
    assert model.hidden(token_ids(2, 1), pool)[0].isfinite().all()


def test_the_balance_loss_is_smallest_when_experts_share_the_work(model: M1ForCausalLM) -> None:
    model.train()
    model(token_ids(4, 30))
    assert model.balance_loss() > model.config.num_experts_per_tok * 0.999
    with torch.no_grad():
        for block in model.blocks:
            block.block_sparse_moe.gate.weight.zero_()
    model(token_ids(4, 30))
    assert model.balance_loss().item() == pytest.approx(model.config.num_experts_per_tok)
