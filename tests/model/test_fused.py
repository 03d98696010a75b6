"""Where kernels serve (CUDA, no gradients), the model is as near to fp32 as torch keeps it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from m1serve.kernels.residual import Sum
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.rmsnorm import RMSNorm
from m1serve.model.state import SequenceState
from m1serve.model.tiny import random_model, tiny_config


def test_a_norm_takes_a_sum_as_it_takes_its_total() -> None:
    norm = RMSNorm(16, eps=1e-5)
    x = Sum(torch.randn(2, 3, 16), torch.randn(2, 3, 16), 2.0, 0.5)
    assert torch.equal(norm(x), norm(x.total()))
    total, normed = norm.with_input(x)
    assert torch.equal(total, x.total())
    assert torch.equal(normed, norm(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("postnorm", [True, False])
def test_a_gpu_serves_bf16_as_exactly_as_torch_trains_it(postnorm: bool) -> None:
    config = replace(tiny_config(64), postnorm=postnorm)
    model = random_model(config).to(torch.bfloat16)
    for block in model.blocks:
        block.block_sparse_moe.gate.float()
    ids = torch.randint(64, (3, 40), generator=torch.Generator().manual_seed(0))
    exact = M1ForCausalLM(config)
    exact.load_state_dict(model.state_dict())
    with torch.no_grad():
        wanted = exact(ids)
    model.cuda()
    trained = model(ids.cuda()).detach().cpu()
    with torch.no_grad():
        pool = SequenceState.allocate(config, 3, 64, device="cuda", dtype=torch.bfloat16)
        hidden, pool = model.hidden(ids[:, :39].cuda(), pool)
        last, _ = model.hidden(ids[:, 39:].cuda(), pool)
        served = model.logits(torch.cat([hidden, last], 1)).cpu()
    errors = [(logits - wanted).abs().mean() for logits in (served, trained)]
    assert errors[0] < 1.3 * errors[1] + 1e-4
    assert errors[0] < 0.02 * wanted.std()


def launches_of_a_step(num_layers: int) -> int:
    """Kernels of one row's decode step of a bf16 model of lightning layers."""
    from torch.profiler import ProfilerActivity, profile

    config = replace(
        tiny_config(64),
        num_hidden_layers=num_layers,
        attn_type_list=(0,) * num_layers,
        hidden_size=256,
        num_attention_heads=4,
        head_dim=128,
    )
    model = random_model(config).to(torch.bfloat16).cuda()
    for block in model.blocks:
        block.block_sparse_moe.gate.float()
    ids = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        pool = SequenceState.allocate(config, 1, 64, device="cuda", dtype=torch.bfloat16)
        model.hidden(ids, pool)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            model.hidden(ids, pool)
            torch.cuda.synchronize()
    on_device = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return len([e for e in on_device if not e.name.startswith(("Memcpy", "Memset"))])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_row_alone_takes_ten_launches_a_lightning_layer() -> None:
    few, many = launches_of_a_step(2), launches_of_a_step(6)
    if not few:
        pytest.skip("the profiler sees no kernels here")
    assert (many - few) / 4 <= 10
