"""Training and serving give the same log-probabilities, and the report finds where they do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import m1serve.model
from m1serve.model.block import Block
from m1serve.model.checkpoint import load_model
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.parity import (
    ParityReport,
    agreement,
    bf16_head_logprobs,
    logprobs_of_logits,
    measure_parity,
    serve,
    train_forward,
)
from m1serve.model.slice import random_model_on
from m1serve.model.tiny import random_model, tiny_config

NANO = Path(m1serve.model.__file__).parent / "nano"


def prompts(model: M1ForCausalLM, num_rows: int, num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (num_rows, num_tokens), generator=generator)


def parity(model: M1ForCausalLM, *, num_new: int = 90) -> ParityReport:
    generator = torch.Generator().manual_seed(0)
    served = serve(model, prompts(model, 2, 70), num_new, chunks=(7, 63), generator=generator)
    return measure_parity(model, served, prompt=70)


def peaked(model: M1ForCausalLM) -> M1ForCausalLM:
    """Random heads are nearly flat, and a flat distribution hides differences."""
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    return model


@pytest.mark.parametrize("seed", range(4))
def test_a_tiny_model_in_fp32_agrees_to_one_part_in_a_million(seed: int) -> None:
    report = parity(random_model(tiny_config(), seed=seed))
    assert report.num_tokens == 180
    assert report.fp32_head.mean_abs_dlogp <= 1e-6
    # two last bits of a log-probability near -6
    assert report.fp32_head.max_abs_dlogp <= 2e-6
    assert all(layer.flip_rate == 0 for layer in report.layers)
    assert max(max(layer.prefill_error, layer.decode_error) for layer in report.layers) < 1e-6


def test_nano_in_fp32_agrees() -> None:
    report = parity(load_model(NANO).eval())
    assert 0.05 < report.entropy < 6
    assert report.fp32_head.r >= 0.9999
    assert report.fp32_head.mean_abs_dlogp <= 1e-5
    assert [layer.kind for layer in report.layers] == ["lightning"] * 7 + ["softmax"]


def test_a_bf16_head_costs_agreement_that_the_fp32_head_keeps() -> None:
    model = peaked(random_model(tiny_config())).to(torch.bfloat16)
    for block in model.blocks:
        block.block_sparse_moe.gate.float()
    report = parity(model, num_new=200)
    assert report.fp32_head.r > 0.999
    assert report.bf16_head.r < report.fp32_head.r
    assert report.bf16_head.mean_abs_dlogp > report.fp32_head.mean_abs_dlogp


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_bf16_model_agrees_on_a_gpu() -> None:
    """M1's head dim, so that the kernels run; its other widths are `m1serve bench parity`'s."""
    config = replace(
        tiny_config(4096), hidden_size=512, head_dim=128, rotary_dim=64, intermediate_size=512
    )
    device = torch.device("cuda")
    model = random_model_on(config, device, torch.bfloat16)
    generator = torch.Generator(device=device).manual_seed(0)
    ids = torch.randint(4096, (4, 300), generator=generator, device=device)
    served = serve(model, ids, 200, chunks=(256, 44), generator=generator)
    report = measure_parity(model, served, prompt=300)
    assert report.fp32_head.r >= 0.997
    assert report.fp32_head.mean_abs_dlogp <= 1.5e-2
    assert max(layer.flip_rate for layer in report.layers) < 0.05


class Drifting(Block):
    """A layer that computes something else when it serves, by one part in a hundred."""

    def forward(self, *given: object) -> Tensor:
        out: Tensor = super().forward(*given)  # type: ignore[arg-type, assignment]
        noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(out.shape[1]))
        return out if self.training else out * (1 + 1e-2 * noise)


def test_the_report_says_in_which_layer_a_mismatch_begins() -> None:
    model = peaked(random_model(tiny_config()))
    drifting = Drifting(model.config, 3)
    drifting.load_state_dict(model.layers[3].state_dict())
    model.layers[3] = drifting.eval()
    report = parity(model)
    for layer in report.layers:
        errors = (layer.prefill_error, layer.decode_error)
        assert max(errors) < 1e-6 if layer.layer < 3 else min(errors) > 1e-4
    assert sum(layer.flip_rate for layer in report.layers[:4]) == 0
    assert sum(layer.flip_rate for layer in report.layers[4:]) > 0
    assert report.fp32_head.mean_abs_dlogp > 1e-4


def test_r_is_of_probabilities() -> None:
    training = torch.tensor([0.9, 0.5, 0.1]).log()
    assert agreement(training, training).r == pytest.approx(1)
    other = torch.tensor([0.8, 0.5, 0.2]).log()
    assert agreement(training, other).r == pytest.approx(1)
    assert agreement(training, other).max_abs_dlogp == pytest.approx(0.6931472)
    opposite = torch.tensor([0.1, 0.5, 0.9]).log()
    assert agreement(training, opposite).r == pytest.approx(-1)


@torch.no_grad()
def test_both_heads_pick_the_tokens_logprob() -> None:
    model = random_model(tiny_config(128))
    ids = prompts(model, 1, 600)
    hidden = model.hidden(ids)[0][0]
    wanted = torch.log_softmax(model.logits(hidden), -1).gather(-1, ids[0][:, None])[:, 0]
    assert (logprobs_of_logits(model, hidden, ids[0]) - wanted).abs().max() < 1e-6
    rounded = bf16_head_logprobs(hidden, model.lm_head.weight, ids[0])
    assert 1e-4 < (rounded - wanted).abs().max() < 0.1


def test_training_records_gradients_and_leaves_the_mode_as_it_was() -> None:
    model = random_model(replace(tiny_config(128), num_hidden_layers=2, attn_type_list=(0, 1)))
    seen = []
    model.blocks[1].register_forward_hook(
        lambda block, _, out: seen.append((block.training, out.requires_grad))
    )
    hidden, _ = train_forward(model, prompts(model, 2, 9))
    assert seen == [(True, True)]
    assert not model.training
    assert not hidden.requires_grad
    assert not model.blocks[0]._forward_hooks


@pytest.mark.parametrize("chunks", [(), (3,), (0, 70), (-1, 71), (40, 31)])
def test_chunks_that_are_not_the_prompt_are_refused(chunks: tuple[int, ...]) -> None:
    model = random_model(tiny_config(128))
    with pytest.raises(ValueError, match="wanted chunks that add up"):
        serve(model, prompts(model, 1, 70), 3, chunks=chunks, generator=torch.Generator())
