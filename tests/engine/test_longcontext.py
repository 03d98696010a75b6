"""The benchmark at length runs from end to end where there is no GPU, and judges by its figures."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import profile

from m1serve.engine.longcontext.bars import Measured, bars, parity_bars, projection
from m1serve.engine.longcontext.measure import Decode, Prefill, SnapshotCost
from m1serve.engine.longcontext.run import run, tiny_plan
from m1serve.engine.longcontext.shares import Share, kind_of, shares_of
from m1serve.kernels.benchmark.bars import Bar
from m1serve.kernels.benchmark.timing import Ceilings
from m1serve.model.footprint import footprint
from m1serve.model.parity import Agreement
from m1serve.model.slice import random_model_on, slice_config
from m1serve.model.tiny import tiny_config

K = 1024


def test_a_tiny_run_measures_everything_and_saves_on_its_way() -> None:
    saved: list[int] = []

    def save(result: dict[str, Any]) -> None:
        saved.append(len(result.get("prefill", [])) + len(result.get("decode", [])))

    plan = replace(tiny_plan(), prompts=(64, 128), snapshot_tokens=96, beside_tokens=1500)
    result = run(plan, device=torch.device("cpu"), dtype=torch.float32, save=save)
    assert [row["tokens"] for row in result["prefill"]] == [64, 128]
    assert [(row["context"], row["batch"]) for row in result["decode"]] == list(plan.decodes)
    assert all(row["ms"] > 0 and row["experts_touched"] >= 2 for row in result["decode"])
    assert result["snapshot"]["speedup"] > 1
    beside = result["beside"]
    # in two steps or more, in each of which the other says a token
    assert beside["num_tokens"] >= 1500 // 1024
    assert 0 < beside["median_ms"] <= beside["p99_ms"] <= beside["max_ms"]
    assert beside["read_seconds"] * 1e3 >= beside["max_ms"]
    assert result["parity"]["r"] > 0.9999
    assert {"mean_abs_dlogp", "r_bf16_head", "head_scale", "layers"} <= result["parity"].keys()
    assert saved == sorted(saved)
    assert len(saved) >= 5


def test_the_slice_has_m1s_widths() -> None:
    sizes = footprint(slice_config(), weight_itemsize=2, kv_itemsize=2)
    assert sizes.weight_bytes == pytest.approx(91e9, rel=0.02)
    assert sizes.state_bytes == 28 * 2**20


def prefill(tokens: int, seconds: float, **ms: float) -> Prefill:
    shares = tuple(Share(kind=kind, ms=value, kernels=()) for kind, value in ms.items())
    return Prefill(
        tokens=tokens,
        chunk_tokens=32 * K,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        peak_gib=None,
        shares=shares,
    )


def decode(context: int, batch: int, ms: float) -> Decode:
    return Decode(
        context=context,
        batch=batch,
        vocab_size=slice_config().vocab_size,
        has_graph=True,
        ms=ms,
        ms_hidden=ms,
        ms_from_rest=ms,
        experts_touched=2.0,
        min_bytes=int(8e9),
    )


def measured(**changes: Any) -> Measured:
    """A run that meets some bars and misses others."""
    given: dict[str, Any] = {
        "config": slice_config(),
        "ceilings": Ceilings(copy_tb_s=4.0, gemm_tflop_s=700.0),
        "sustained_gemm_tflop_s": 630.0,
        "prefill": (
            prefill(64 * K, 1.1, softmax_attention=110.0, experts=400.0, gemm=400.0,
                    elementwise=55.0),
            prefill(K * K, 47.0, softmax_attention=28_000.0),
        ),
        "decode": (decode(K, 1, 2.5), decode(256 * K, 1, 2.8), decode(K, 32, 2.2)),
        "snapshot": SnapshotCost(
            tokens=256 * K, read_seconds=6.0, take_ms=1.0, find_ms=1.0, restore_ms=1.0,
            speedup=3000.0, num_bytes=1,
        ),
    }  # fmt: skip
    return Measured(**{**given, **changes})


def test_bars_are_read_off_the_figures() -> None:
    found = {bar.name: bar for bar in bars(measured())}
    assert found["seconds, 64K"].is_met
    assert not found["seconds, 1M"].is_met
    # 16 * (1.1 - 0.11) + 256 * 0.11 = 44 s
    assert found["1M over what 64K explains"].value == pytest.approx(47 / 44, rel=1e-6)
    # 64 heads * 128 * 4 FLOPs a key, half of 65,536 squared
    assert found["softmax attention TFLOP/s, 65536"].value == pytest.approx(640, rel=0.01)
    # 8 layers of 2 experts of 6 * 6144 * 9216 FLOPs a token, in 400 ms
    experts = found["experts, share of the GEMM ceiling, 64K"].value
    assert experts == pytest.approx(8 * 2 * 6 * 6144 * 9216 * 64 * K / 0.4 / 700e12)
    sustained = found["experts, share of the sustained GEMM rate, 64K"].value
    assert sustained == pytest.approx(experts * 700 / 630)
    assert found["decode at 256K over 1K"].value == pytest.approx(1.12)
    assert found["decode, share of the bytes, batch 32"].value == pytest.approx(8e9 / 4e12 / 2.2e-3)
    assert found["decode, share of the bytes, batch 128"] == Bar(
        name="decode, share of the bytes, batch 128", value=None, sense=">=", wanted=0.9
    )
    assert not found["decode, share of the bytes, batch 128"].is_met


def test_parity_is_judged_by_its_correlation_and_its_mean() -> None:
    far = Agreement(r=0.9996, mean_abs_dlogp=0.03, max_abs_dlogp=0.5)
    assert [bar.is_met for bar in parity_bars(far)] == [True, False]


def test_a_projection_says_what_it_is() -> None:
    said = projection(measured())
    assert said["is_projection"] is True
    assert said["prefill_seconds"] == {str(64 * K): 1.1 * 10 / 8, str(K * K): 47.0 * 10 / 8}


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("walk_kernel", "lightning"),
        ("join_parts_kernel", "softmax_attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "softmax_attention"),
        (
            "void cutlass::device_kernel<GemmUniversal<cutlass::gemm::GroupProblemShape<...",
            "experts",
        ),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "gemm"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("norm_kernel", "elementwise"),
        ("void at::native::elementwise_kernel<128, 4, ...", "elementwise"),
    ],
)
def test_kernels_are_told_apart_by_name(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def event(name: str, *, ms: float = 0.0, parent: Any = None, launched: str = "") -> Any:
    """As the profiler's: a kernel on the device, or an operator on the host that launched one."""
    kernels = [SimpleNamespace(name=launched, duration=1e3 * ms)] if launched else []
    return SimpleNamespace(
        name=name,
        device_type=DeviceType.CPU if launched or parent or not ms else DeviceType.CUDA,
        is_user_annotation=False,
        self_device_time_total=1e3 * ms,
        kernels=kernels,
        cpu_parent=parent,
    )


def test_a_product_is_the_experts_where_one_of_their_operators_launched_it() -> None:
    experts = event("m1serve: experts")
    mm = event("aten::mm", ms=2.0, parent=experts, launched="nvjet_a")
    silu = event("aten::silu", ms=0.5, parent=experts, launched="silu_kernel")
    dense = event("aten::mm", ms=3.0, parent=event("aten::linear"), launched="nvjet_a")
    device = [event("nvjet_a", ms=5.0), event("silu_kernel", ms=0.5)]
    found = {share.kind: share.ms for share in shares_of([experts, mm, silu, dense, *device])}
    assert found == pytest.approx({"experts": 2.0, "gemm": 3.0, "elementwise": 0.5})


def test_the_profiler_sees_which_operators_are_the_experts() -> None:
    from m1serve.engine.longcontext.shares import _is_of_experts, _named_experts

    model = random_model_on(tiny_config(), torch.device("cpu"), torch.float32)
    with torch.no_grad(), _named_experts(model), profile() as profiler:
        model(torch.arange(8)[None])
    products = [e for e in profiler.events() if e.name in ("aten::mm", "aten::addmm")]
    within = [e for e in products if _is_of_experts(e)]
    assert 0 < len(within) < len(products)
