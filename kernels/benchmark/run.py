"""One process of the benchmark: takes the cases that no process before it took, one by one."""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from m1serve.kernels.benchmark import cases, layer_cases, pass_cases, step_cases, tile_cases
from m1serve.kernels.benchmark.bars import bars
from m1serve.kernels.benchmark.cases import Case, K
from m1serve.kernels.benchmark.checks import (
    CheckCase,
    Setting,
    backward_checks,
    far_checks,
    forward_checks,
    head_dim_checks,
    peer_checks,
    share_checks,
)
from m1serve.kernels.benchmark.decode_checks import decode_checks
from m1serve.kernels.benchmark.isolation_checks import isolation_checks
from m1serve.kernels.benchmark.layer_cases import LOOP, UNFUSED
from m1serve.kernels.benchmark.layer_checks import layer_checks
from m1serve.kernels.benchmark.ours import M1serve
from m1serve.kernels.benchmark.peers import PEERS, Peer, compile_in_parallel
from m1serve.kernels.benchmark.pool_checks import pool_checks
from m1serve.kernels.benchmark.report import Check, Report, Row, read_report
from m1serve.kernels.benchmark.softmax_cases import softmax_cases
from m1serve.kernels.benchmark.softmax_checks import softmax_checks
from m1serve.kernels.benchmark.step_cases import GROUPED, TORCH
from m1serve.kernels.benchmark.step_checks import step_checks
from m1serve.kernels.benchmark.timing import measure_ceilings

PARTS = (
    "prefill",
    "share",
    "varlen",
    "forward_backward",
    "decode",
    "norm",
    "moe",
    "linear_logprobs",
    "step",
    "passes",
    "softmax",
    "checks",
)
# other choices than ours: only when asked for
EXTRA_PARTS = ("tiles",)
QUICK_LENGTHS = (4 * K, 64 * K, 256 * K)
QUICK_BATCHES = (1, 32, 64)
QUICK_CHECKS = Setting(lengths=(1, 65, 4097), num_steps=2000)
BASELINES = (UNFUSED, LOOP, GROUPED, TORCH)
# the exit status that asks for another process
AGAIN = 75
UNFINISHED = "did not finish: its process ended"
COMPILE_TIMEOUT_S = 150
# what checks may leave in torch's cache of device memory
ROOM_BYTES = 32 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one run measures, and how long it may take."""

    command: str
    out: Path
    peers: Path | None
    only: tuple[str, ...]
    is_quick: bool
    notes: Path | None
    budget_s: float
    case_timeout_s: float


def run(plan: Plan) -> int:
    """0 at the end of all cases, or AGAIN where the CUDA context is lost."""
    if not torch.cuda.is_available():
        sys.stderr.write("no CUDA device: these kernels are timed on a GPU\n")
        return 1
    report = read_report(plan.out) if plan.out.exists() else start(plan)
    if not report.ceilings:
        report.ceilings.append(measure_ceilings())
    deadline = datetime.fromisoformat(report.date).timestamp() + plan.budget_s
    for case in our_cases(plan):
        if not take(case, report, plan):
            return AGAIN
    if plan.peers is not None and not plan.is_quick:
        for case in peer_cases(plan, report):
            if time.time() < deadline:
                if not take(case, report, plan):
                    return AGAIN
            elif key(case) not in keys(report):
                record_failure(case, report, "not started: the run's budget is spent")
    report.ceilings.append(measure_ceilings())
    report.write(plan.out, [bar.to_json() for bar in bars(report)])
    return 0


def start(plan: Plan) -> Report:
    notes = plan.notes.read_text().splitlines() if plan.notes is not None else []
    return Report(
        command=plan.command,
        device=torch.cuda.get_device_name(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        notes=[note for note in notes if note.strip()],
    )


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "cuda": str(torch.version.cuda)}
    for name in ("torch", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def our_cases(plan: Plan) -> Iterator[Case | CheckCase]:
    ours = M1serve()
    timed = dict(lightning_parts(ours, is_quick=plan.is_quick))
    timed |= {
        "norm": layer_cases.norm_cases(),
        "moe": layer_cases.expert_cases(),
        "linear_logprobs": layer_cases.logprob_cases(),
        "step": step_cases.step_cases(),
        "passes": pass_cases.pass_cases(),
        "softmax": softmax_cases(),
        "tiles": tile_cases.tile_cases(),
    }
    for part in plan.only:
        for case in timed.get(part, ()):
            if not (plan.is_quick and case.impl in BASELINES):
                yield case
    if "checks" in plan.only:
        yield from all_checks(QUICK_CHECKS if plan.is_quick else Setting())


def all_checks(setting: Setting) -> Iterator[CheckCase]:
    """Every comparison of ours."""
    for checks in (
        forward_checks,
        backward_checks,
        head_dim_checks,
        share_checks,
        pool_checks,
        decode_checks,
        isolation_checks,
        layer_checks,
        step_checks,
        softmax_checks,
        far_checks,
    ):
        yield from checks(setting)


def lightning_parts(impl: Peer, *, is_quick: bool) -> Iterator[tuple[str, Iterable[Case]]]:
    if is_quick:
        yield "prefill", cases.prefill_cases(impl, QUICK_LENGTHS)
        yield "share", cases.share_cases(impl, QUICK_LENGTHS[1:])
        yield "forward_backward", cases.training_cases(impl, QUICK_LENGTHS[:2])
        yield "decode", cases.decode_cases(impl, QUICK_BATCHES)
    else:
        yield "prefill", cases.prefill_cases(impl)
        yield "share", cases.share_cases(impl)
        yield "forward_backward", cases.training_cases(impl)
        yield "decode", cases.decode_cases(impl)
    yield "varlen", cases.varlen_cases(impl)


def peer_cases(plan: Plan, report: Report) -> Iterator[Case | CheckCase]:
    assert plan.peers is not None
    if not any(row.impl == "fla" for row in report.rows):
        num_processes = max(1, min(12, (os.cpu_count() or 2) - 2))
        compile_in_parallel(plan.peers, num_processes, timeout_s=COMPILE_TIMEOUT_S)
    for make in PEERS:
        try:
            impl = make(plan.peers)
        except (ImportError, AttributeError, OSError, ValueError) as error:
            report.notes.append(f"a peer could not be loaded: {type(error).__name__}: {error}")
            continue
        timed = dict(lightning_parts(impl, is_quick=False))
        for part in plan.only:
            yield from timed.get(part, ())
        if "checks" in plan.only:
            yield from peer_checks(impl, Setting())


def take(case: Case | CheckCase, report: Report, plan: Plan) -> bool:
    """Runs one case unless the report has it; False when this process can go on no further.

    It is in the file as unfinished before it starts, so that whatever ends the process skips it.
    """
    if key(case) in keys(report):
        return True
    record_failure(case, report, UNFINISHED)
    report.write(plan.out)
    late = threading.Timer(plan.case_timeout_s, os._exit, (AGAIN,))
    late.daemon = True
    late.start()
    is_usable = True
    try:
        record(case, report)
    except Exception as error:  # noqa: BLE001 - a failing case is a row, and the others still run
        forget(case, report)
        record_failure(case, report, f"{type(error).__name__}: {error}".splitlines()[0][:300])
        is_usable = is_context_alive()
    finally:
        late.cancel()
    if is_usable and (isinstance(case, Case) or torch.cuda.memory_reserved() > ROOM_BYTES):
        gc.collect()
        torch.cuda.empty_cache()
    report.write(plan.out)
    sys.stderr.write(line(case, report) + "\n")
    return is_usable


def keys(report: Report) -> set[str]:
    return {row.key for row in report.rows} | {check.key for check in report.checks}


def key(case: Case | CheckCase) -> str:
    if isinstance(case, Case):
        return Row(op=case.op, case=case.case, impl=case.impl).key
    return as_check(case, math.nan).key


def as_check(case: CheckCase, found: float, error: str = "") -> Check:
    return Check(
        op=case.op,
        case=case.case,
        dtype=case.dtype_name,
        impl=case.impl,
        worst_head_error=found,
        bar=case.bar,
        error=error,
    )


def record(case: Case | CheckCase, report: Report) -> None:
    """Replaces the case's entry, if it has one, by what it gives."""
    if isinstance(case, Case):
        row = case.run()
        forget(case, report)
        report.rows.append(row)
    else:
        check = as_check(case, case.run())
        forget(case, report)
        report.checks.append(check)


def record_failure(case: Case | CheckCase, report: Report, error: str) -> None:
    if isinstance(case, Case):
        report.rows.append(Row(op=case.op, case=case.case, impl=case.impl, error=error))
    else:
        report.checks.append(as_check(case, math.nan, error))


def forget(case: Case | CheckCase, report: Report) -> None:
    report.rows[:] = [row for row in report.rows if row.key != key(case)]
    report.checks[:] = [check for check in report.checks if check.key != key(case)]


def is_context_alive() -> bool:
    """An illegal access poisons the CUDA context for good."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def line(case: Case | CheckCase, report: Report) -> str:
    """One line of progress."""
    for check in report.checks:
        if check.key == key(case):
            verdict = "ok" if check.ok else "FAILED"
            return f"{verdict} {check.key} {check.worst_head_error:.3g} {check.error}"
    for row in report.rows:
        if row.key == key(case) and row.ms is not None:
            share = row.share(report.best)
            return f"{row.key} {row.ms:.4f} ms" + ("" if share is None else f" {share:.1%}")
    return f"FAILED {key(case)}"
