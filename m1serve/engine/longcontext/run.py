"""The whole run at one size, as the JSON of benchmarks/results/longcontext-h200.json.

Reading, decoding and snapshots, the two ceilings of the same run, and the bars of an H200.
"""

from __future__ import annotations

import gc
import logging
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from m1serve.config import EngineSettings
from m1serve.engine.longcontext.bars import Measured, bars, parity_bars, projection
from m1serve.engine.longcontext.beside import measure_beside
from m1serve.engine.longcontext.measure import (
    Decode,
    Prefill,
    SnapshotCost,
    measure_decode,
    measure_prefill,
    measure_snapshot,
)
from m1serve.engine.longcontext.rig import Rig
from m1serve.engine.memory_plan import memory_for
from m1serve.kernels.benchmark.timing import measure_ceilings, sustained_gemm_tflop_s
from m1serve.model.config import M1Config
from m1serve.model.footprint import footprint
from m1serve.model.parity import ParityReport
from m1serve.model.parity_random import RandomRun, random_parity
from m1serve.model.slice import M1_VOCAB, random_model_on, slice_config
from m1serve.model.tiny import tiny_config

logger = logging.getLogger(__name__)
Save = Callable[[dict[str, Any]], None]
K = 1024
_ROOM = 1024
"""Tokens that a timed row may say"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    config: M1Config
    prompts: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]
    """context, batch"""
    other_vocab: int | None
    """A second vocabulary for the decode of one row at the first context"""
    chunk_tokens: int
    snapshot_tokens: int
    num_slots: int
    profiled: tuple[int, ...] = ()
    """Prompts that are read a second time under the profiler"""
    beside_tokens: int | None
    """Of a prompt that is read while another request decodes"""
    parity: RandomRun = field(default_factory=lambda: RandomRun(head_scale=1.0))
    """Of the weights as they are drawn"""
    sharper_heads: tuple[float, ...] = ()
    """Further runs with the head multiplied: a surer model, and the same mismatch seen larger"""


def slice_plan() -> Plan:
    """M1's widths in eight layers: about 91 GB of weights and 38 GB of rows."""
    return Plan(
        config=slice_config(),
        prompts=(8 * K, 64 * K, 256 * K, K * K),
        decodes=(
            (K, 1), (1000, 1), (64 * K, 1), (80_000, 1), (256 * K, 1), (K * K, 1),
            (K, 32), (64 * K, 32), (256 * K, 32), (K * K, 8), (K, 128),
        ),
        other_vocab=M1_VOCAB,
        chunk_tokens=32 * K,
        snapshot_tokens=256 * K,
        num_slots=128,
        beside_tokens=K * K,
        profiled=(64 * K, K * K),
        sharper_heads=(2.0, 4.0),
    )  # fmt: skip


def tiny_plan() -> Plan:
    """Seconds on a CPU: proves the program, says nothing of speed."""
    return Plan(
        config=tiny_config(),
        prompts=(256, 1024),
        decodes=((64, 1), (1024, 1), (256, 4)),
        other_vocab=None,
        chunk_tokens=256,
        snapshot_tokens=512,
        num_slots=4,
        beside_tokens=2048,
        parity=RandomRun(rows=2, prompt_tokens=64, sampled_tokens=16, chunk=48, head_scale=1.0),
    )


def run(plan: Plan, *, device: torch.device, dtype: torch.dtype, save: Save) -> dict[str, Any]:
    """`save` gets the result after each measurement: a run that is cut leaves what it had."""
    is_cuda = device.type == "cuda"
    ceilings = measure_ceilings() if is_cuda else None
    sustained = sustained_gemm_tflop_s() if is_cuda else 0.0
    _free()
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.machine(),
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "config": plan.config.to_dict(),
        "ceilings": asdict(ceilings) if ceilings else None,
        "sustained_gemm_tflop_s": sustained or None,
    }
    prefill, cost, rows = _at_length(plan, device, dtype, result, save)
    _free()
    if plan.other_vocab is not None:
        rows.append(_at_vocab(plan, plan.other_vocab, device, dtype))
        result["decode"] = [asdict(row) for row in rows]
        _free()
    if ceilings is not None:
        measured = Measured(
            config=plan.config,
            ceilings=ceilings,
            sustained_gemm_tflop_s=sustained,
            prefill=tuple(prefill),
            decode=tuple(rows),
            snapshot=cost,
        )
        result["bars"] = [bar.to_json() for bar in bars(measured)]
        result["projection"] = projection(measured)
    save(result)
    _compare(plan, device, dtype, result, save)
    if plan.beside_tokens is not None:
        model = random_model_on(plan.config, device, dtype)
        result["beside"] = asdict(measure_beside(model, plan.beside_tokens))
        save(result)
    return result


def _compare(
    plan: Plan, device: torch.device, dtype: torch.dtype, result: dict[str, Any], save: Save
) -> None:
    """Training against serving, with the head as it is drawn and with sharper ones."""
    for scale in (None, *plan.sharper_heads):
        given = plan.parity if scale is None else replace(plan.parity, head_scale=scale)
        report = random_parity(plan.config, given, device=device, dtype=dtype)
        name = "parity" if scale is None else f"parity_head_x{scale:g}"
        result[name] = _parity_json(given, report)
        if scale is None and "bars" in result:
            result["bars"] += [bar.to_json() for bar in parity_bars(report.fp32_head)]
        save(result)
        _free()


def _at_length(
    plan: Plan, device: torch.device, dtype: torch.dtype, result: dict[str, Any], save: Save
) -> tuple[list[Prefill], SnapshotCost, list[Decode]]:
    """Everything but the second vocabulary; its memory is free when this returns."""
    rig = Rig(random_model_on(plan.config, device, dtype), _settings(plan, dtype))
    rig.fill_pages()
    prefill: list[Prefill] = []
    for tokens in plan.prompts:
        has_shares = tokens in plan.profiled
        prefill.append(
            measure_prefill(rig, tokens, chunk_tokens=plan.chunk_tokens, has_shares=has_shares)
        )
        logger.info("prefill %d: %.3f s", tokens, prefill[-1].seconds)
        result["prefill"] = [asdict(row) for row in prefill]
        save(result)
    cost = measure_snapshot(rig, plan.snapshot_tokens, chunk_tokens=plan.chunk_tokens)
    result["snapshot"] = asdict(cost)
    rows: list[Decode] = []
    for context, batch in plan.decodes:
        rows.append(measure_decode(rig, context=context, batch=batch))
        logger.info("decode %d x %d: %.3f ms", context, batch, rows[-1].ms)
        result["decode"] = [asdict(row) for row in rows]
        save(result)
    return prefill, cost, rows


def _at_vocab(plan: Plan, vocab_size: int, device: torch.device, dtype: torch.dtype) -> Decode:
    """One row at the first context, with another head."""
    context, _ = plan.decodes[0]
    other = replace(
        plan,
        config=replace(plan.config, vocab_size=vocab_size),
        num_slots=1,
        prompts=(context,),
        decodes=((context, 1),),
        snapshot_tokens=context,
    )
    rig = Rig(random_model_on(other.config, device, dtype), _settings(other, dtype))
    return measure_decode(rig, context=context, batch=1)


def _parity_json(run_of: RandomRun, report: ParityReport) -> dict[str, Any]:
    """Training against serving on the same tokens; by layer too."""
    return {
        "r": report.fp32_head.r,
        "mean_abs_dlogp": report.fp32_head.mean_abs_dlogp,
        "r_bf16_head": report.bf16_head.r,
        **asdict(run_of),
        **asdict(report),
    }


def _settings(plan: Plan, dtype: torch.dtype) -> EngineSettings:
    """Pages for the longest prompt and a row restored from it, and for the largest batch."""
    size = dtype.itemsize
    state_bytes = footprint(plan.config, weight_itemsize=size, kv_itemsize=size).state_bytes
    longest = _ROOM + max(*plan.prompts, *(context for context, _ in plan.decodes))
    batch_tokens = max(batch * (context + _ROOM) for context, batch in plan.decodes)
    tokens = max(longest + plan.snapshot_tokens, batch_tokens)
    # only states and ids count: one snapshot is kept at a time
    snapshot_bytes = 2 * state_bytes + 8 * longest
    return EngineSettings(
        num_slots=plan.num_slots,
        max_model_len=longest,
        snapshot_bytes=snapshot_bytes,
        memory_bytes=memory_for(
            plan.config,
            num_slots=plan.num_slots,
            num_tokens=tokens + _ROOM,
            snapshot_bytes=snapshot_bytes,
            kv_itemsize=size,
        ),
    )


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
