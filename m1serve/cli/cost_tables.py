"""What `m1serve cost` prints: five tables, the verdict on the report's claims, the conventions."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from m1serve.cli.cost_verdict import claim_lines, rl_lines
from m1serve.cost.report import Report
from m1serve.cost.rl import RlCost
from m1serve.cost.serving import ServingCost, Timing
from m1serve.cost.shape import Shape

GIB = 2**30
MISFIT = "does not fit"


def print_report(report: Report, console: Console) -> None:
    for table in (
        _generation_table(report),
        _prefill_table(report),
        _memory_table(report),
        _serving_table(report),
        _rl_table(report),
    ):
        console.print(table)
        console.print()
    console.print("[bold]MiniMax-M1's report, Figure 1 (right)[/bold]")
    for line in claim_lines(report.claim):
        console.print(f"  {line}", highlight=False)
    console.print("[bold]MiniMax-M1's report, the RL run[/bold]")
    for line in rl_lines(report.paper_rl, report.question.run):
        console.print(f"  {line}", highlight=False)
    console.print("[bold]Conventions[/bold]")
    for line in report.conventions:
        console.print(f"  - {line}", highlight=False)


def _generation_table(report: Report) -> Table:
    table = _table(
        "FLOPs of decoding: the token at context n (GFLOP), all n tokens (PFLOP), and the figure's",
        "context n",
    )
    asked, expanded, absorbed, qwen3 = (shape.name for shape in report.shapes)
    for column in (
        f"token: {asked}", "R1 exp.", "R1 abs.", "Qwen3", "over R1 exp. (abs.)",
        f"all: {asked}", "R1 exp.", "R1 abs.", "Qwen3", "over R1 exp. (abs.)", "figure: M1 over R1",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    names = (asked, expanded, absorbed, qwen3)
    for row, share in zip(report.lengths, report.claim.shares, strict=True):
        token, generation = row.token_flops, row.generation_flops
        table.add_row(
            f"{row.num_tokens:,}",
            *(_number(token[name] / 1e9, 1) for name in names),
            _ratios(token, asked, expanded, absorbed),
            *(_number(generation[name] / 1e15, 2) for name in names),
            _ratios(generation, asked, expanded, absorbed),
            "" if share.figure is None else f"{share.figure:.3f}",
        )
    return table


def _ratios(flops: dict[str, int], asked: str, expanded: str, absorbed: str) -> str:
    ratios = (flops[asked] / flops[rival] for rival in (expanded, absorbed))
    return "{} ({})".format(*(_number(ratio, 3) for ratio in ratios))


def _number(value: float, decimals: int) -> str:
    """So many decimals, or two digits where these would show nothing."""
    return f"{value:,.{decimals}f}" if value >= 10**-decimals else f"{value:.2g}"


def _prefill_table(report: Report) -> Table:
    machine = report.question.machine
    table = _table(
        f"Reading a prompt of n tokens: PFLOP, and the roofline of {machine.num_gpus} x "
        f"{machine.gpu.name} at MFU {machine.mfu:.0%}; R1's prefill is expanded in both readings",
        "prompt n",
    )
    asked, expanded, _, qwen3 = (shape.name for shape in report.shapes)
    for name in (asked, "DeepSeek-R1", qwen3):
        table.add_column(f"{name} PFLOP", justify="right")
        table.add_column("time", justify="right")
    table.add_column(f"{asked}: a token at n over one at 0", justify="right")
    for row in report.lengths:
        cells = []
        for name in (asked, expanded, qwen3):
            cells += [f"{row.prefill_flops[name] / 1e15:,.4g}", _seconds(row.prefill_s[name])]
        table.add_row(f"{row.num_tokens:,}", *cells, f"{row.prefill_token_ratio:.2f}")
    return table


def _memory_table(report: Report) -> Table:
    storage = report.question.storage
    table = _table(
        f"Memory: weights at {8 * storage.weight_itemsize} bits (M1's router fp32), states fp32, "
        f"caches at {8 * storage.kv_itemsize} bits",
        "model",
    )
    for column in (
        "parameters", "weights", "state a sequence", "cache a token",
        "sequence of 64K", "of 1M", "a step reads, batch 1 at 64K", "batch 32 at 64K",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for shape in report.shapes:
        table.add_row(shape.name, *_memory_cells(shape))
    return table


def _memory_cells(shape: Shape) -> tuple[str, ...]:
    return (
        _params(shape.num_params),
        _gigabytes(shape.weight_bytes),
        f"{shape.state_bytes / 2**20:,.4g} MiB",
        f"{shape.kv_token_bytes:,} B",
        _number(shape.sequence_bytes(65_536) / GIB, 2) + " GiB",
        f"{shape.sequence_bytes(1_000_000) / GIB:,.1f} GiB",
        _gigabytes(shape.decode_bytes(65_536, batch=1)),
        _gigabytes(shape.decode_bytes(65_536, batch=32)),
    )


def _params(count: int) -> str:
    return f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.2f} M"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _serving_table(report: Report) -> Table:
    machine, load = report.question.machine, report.question.load
    table = _table(
        f"Serving: {load.prompt_tokens:,} tokens in, {load.output_tokens:,} out, on "
        f"{machine.num_gpus} x {machine.gpu.name}. Assumed: {machine.price_per_gpu_hour:.2f} $ a "
        f"GPU-hour, MFU {machine.mfu:.0%}, bandwidth {machine.bandwidth_share:.0%}, memory "
        f"{machine.memory_share:.0%}",
        "model",
    )
    for column in (
        "PFLOP in + out", "sequences that fit", "prefill", "at once", "ms a step", "bound by",
        "$ a request", "$/M in", "$/M out", "full: ms a step", "$/M out",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for cost in report.serving:
        table.add_row(cost.model, *_serving_cells(cost))
    return table


def _serving_cells(cost: ServingCost) -> tuple[str, ...]:
    flops = " + ".join(
        _number(count / 1e15, 2) for count in (cost.prefill_flops, cost.generation_flops)
    )
    if cost.timing is None or cost.full_timing is None:
        return flops, f"[red]0: {MISFIT}[/red]", *[""] * 9
    return (
        flops,
        f"{cost.max_sequences:,}",
        _seconds(cost.timing.prefill_s),
        f"{cost.timing.batch:,}",
        f"{cost.timing.step_ms:,.3g}",
        _bound(cost.timing),
        f"{cost.timing.dollars:.3g}",
        f"{cost.timing.dollars_per_million_prompt_tokens:.3g}",
        f"{cost.timing.dollars_per_million_output_tokens:.3g}",
        f"{cost.full_timing.step_ms:,.3g}",
        f"{cost.full_timing.dollars_per_million_output_tokens:.3g}",
    )


def _bound(timing: Timing) -> str:
    return "bytes" if timing.is_bound_by_bytes else "FLOPs"


def _seconds(value: float) -> str:
    return f"{value:,.2f} s" if value >= 1 else f"{1e3 * value:,.3g} ms"


def _rl_table(report: Report) -> Table:
    run = report.question.run
    table = _table(
        f"RL: {run.num_steps:,} steps of {run.prompts_per_step} prompts x {run.group_size} "
        f"rollouts of {run.rollout_tokens:,} tokens behind {run.prompt_tokens:,}; training "
        f"{run.num_forwards} x forward, each token once; GPUs and shares as above",
        "model",
    )
    for column in (
        "tokens sampled", "ZFLOP sampling", "training (3 x)", "training as asked",
        "GPU-hours sampling", "training", "together", "dollars",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for cost in report.rl:
        table.add_row(cost.model, *_rl_cells(cost))
    return table


def _rl_cells(cost: RlCost) -> tuple[str, ...]:
    return (
        f"{cost.sampled_tokens / 1e9:,.1f} B",
        f"{cost.sampling_flops / 1e21:,.3g}",
        f"{cost.training_flops_if_kept / 1e21:,.3g}",
        f"{cost.training_flops / 1e21:,.3g}",
        _hours(cost.sampling_gpu_hours),
        _hours(cost.training_gpu_hours),
        _hours(cost.gpu_hours),
        "" if cost.dollars is None else f"{cost.dollars:,.0f}",
    )


def _hours(value: float | None) -> str:
    return f"[red]{MISFIT}[/red]" if value is None else f"{value:,.0f}"


def _table(title: str, first_column: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first_column)
    return table
