"""The bars the kernels are held to on an H200, read off a report's rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from m1serve.kernels.benchmark import pass_cases, softmax_cases
from m1serve.kernels.benchmark.cases import (
    FIRST,
    LAST,
    MIDDLE,
    SCALE,
    K,
    prefill_name,
    share_name,
    varlen_name,
)
from m1serve.kernels.benchmark.layer_cases import FOUR_GEMMS, LOGPROBS_NAME
from m1serve.kernels.benchmark.report import JsonRow, Report
from m1serve.kernels.benchmark.step_cases import experts_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A measured figure and what it must reach; None is not measured, or failed."""

    name: str
    value: float | None
    sense: Literal[">=", "<="]
    wanted: float

    @property
    def is_met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.wanted if self.sense == ">=" else self.value <= self.wanted

    def to_json(self) -> JsonRow:
        value = None if self.value is None else round(self.value, 4)
        return {
            "bar": f"{self.name} {self.sense} {self.wanted:g}",
            "value": value,
            "is_met": self.is_met,
        }

    def __str__(self) -> str:
        value = "-" if self.value is None else f"{self.value:.3f}"
        verdict = "ok  " if self.is_met else "MISS"
        return f"{verdict} {value:>7} {self.sense} {self.wanted:<5g} {self.name}"


def bars(report: Report) -> list[Bar]:
    found = [*_prefill_bars(report), *_decode_bars(report)]
    name = prefill_name(64 * K, MIDDLE)
    share = report.share_of("forward_backward", name)
    found.append(Bar(name="share, forward_backward " + name, value=share, sense=">=", wanted=0.5))
    found += _logprob_bars(report)
    for num_tokens in (32, 128):
        name = experts_name(num_tokens)
        share = report.share_of("moe_decode", name)
        found.append(Bar(name="share, moe_decode " + name, value=share, sense=">=", wanted=0.9))
    name = pass_cases.experts_name(pass_cases.TOKENS)
    share = report.share_of("moe_prefill", name)
    found.append(Bar(name="share, moe_prefill " + name, value=share, sense=">=", wanted=0.82))
    name = "ms, passes of 8 layers at 64K tokens"
    found.append(Bar(name=name, value=pass_cases.slice_ms(report), sense="<=", wanted=60))
    found += _softmax_bars(report)
    failed = float(len(report.failed_checks)) if report.checks else None
    found.append(Bar(name="failed checks", value=failed, sense="<=", wanted=0))
    return found


def _prefill_bars(report: Report) -> Iterator[Bar]:
    wanted = {
        prefill_name(length * K, layer): 0.85
        for length in (16, 64, 256, 1024)
        for layer in (FIRST, MIDDLE, LAST)
    }
    wanted[varlen_name((8 * K,) * 8, MIDDLE)] = 0.80
    for layer, long in ((FIRST, 0.70), (LAST, 0.58)):
        wanted[share_name(64 * K, layer)] = 0.55
        wanted[share_name(256 * K, layer)] = wanted[share_name(1024 * K, layer)] = long
    for case, least in wanted.items():
        share = report.share_of("prefill", case)
        yield Bar(name=f"share, prefill {case}", value=share, sense=">=", wanted=least)


def _decode_bars(report: Report) -> Iterator[Bar]:
    for num_rows, least in ((256, 0.95), (128, 0.95), (64, 0.95), (32, 0.90)):
        share = report.share_of("decode", f"B={num_rows}")
        yield Bar(name=f"share, decode B={num_rows}", value=share, sense=">=", wanted=least)
    ratio = _ratio(report.time_of("decode", "B=1"), report.time_of("decode", "B=1", SCALE))
    yield Bar(name=f"decode B=1 over {SCALE}", value=ratio, sense="<=", wanted=1.2)


def _logprob_bars(report: Report) -> Iterator[Bar]:
    op = "linear_logprobs"
    gemms = report.time_of(op, LOGPROBS_NAME, FOUR_GEMMS)
    ratio = _ratio(report.time_of(op, LOGPROBS_NAME), gemms)
    yield Bar(name=f"{op} over {FOUR_GEMMS}", value=ratio, sense="<=", wanted=1.2)
    beyond = report.extra_of(op, LOGPROBS_NAME, "peak_gib_beyond")
    yield Bar(name=f"GiB, {op} beyond results", value=beyond, sense="<=", wanted=1.0)


def _softmax_bars(report: Report) -> Iterator[Bar]:
    # 15 % of a batch-1 step of 2.5 ms, of which one layer in eight is softmax attention
    added = softmax_cases.added_decode_ms(report)
    yield Bar(name="ms, decode at 256K beyond 1K", value=added, sense="<=", wanted=0.375)
    for num_past in softmax_cases.PASTS:
        name = "TFLOP/s, softmax prefill " + softmax_cases.softmax_name(num_past)
        rate = softmax_cases.prefill_tflop_s(report, num_past)
        yield Bar(name=name, value=rate, sense=">=", wanted=640)


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None
