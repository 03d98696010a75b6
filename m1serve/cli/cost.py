"""`m1serve cost`: FLOPs, bytes, memory, GPU-hours and dollars of a model beside R1 and Qwen3."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from m1serve.cli import options
from m1serve.cli.console import wide_console
from m1serve.errors import ConfigError

if TYPE_CHECKING:
    from m1serve.cost.machine import Gpu
    from m1serve.cost.report import Report
    from m1serve.model.config import M1Config

_SERVING, _RL = "Serving", "Reinforcement learning"

Model = Annotated[
    str, typer.Option("--model", metavar="NAME|DIR", help="m1, slice, nano or a model directory.")
]
GpuName = Annotated[str, typer.Option("--gpu", help="h200, h800 or h20.")]
NumGpus = Annotated[int, typer.Option("--gpus", help="That hold one copy of the model.")]
Price = Annotated[float, typer.Option("--price", help="Dollars a GPU-hour: an assumption.")]
Mfu = Annotated[float, typer.Option("--mfu", help="Share of the peak FLOP/s: an assumption.")]
Bandwidth = Annotated[
    float, typer.Option("--bandwidth-share", help="Of the peak in decode: an assumption.")
]
WeightBits = Annotated[int, typer.Option("--weight-bits", help="8 or 16, of every model.")]
KvBits = Annotated[int, typer.Option("--kv-bits", help="8 or 16, of every cache.")]
PromptTokens = Annotated[
    int, typer.Option("--prompt-tokens", rich_help_panel=_SERVING, help="Of one request.")
]
OutputTokens = Annotated[
    int, typer.Option("--output-tokens", rich_help_panel=_SERVING, help="Of one request.")
]
Concurrency = Annotated[
    int, typer.Option("--concurrency", rich_help_panel=_SERVING, help="Requests at once.")
]
RlPromptTokens = Annotated[
    int, typer.Option("--rl-prompt-tokens", rich_help_panel=_RL, help="Of one rollout.")
]
RolloutTokens = Annotated[
    int, typer.Option("--rollout-tokens", rich_help_panel=_RL, help="Sampled, in the mean.")
]
GroupSize = Annotated[
    int, typer.Option("--group-size", rich_help_panel=_RL, help="Rollouts of a prompt.")
]
PromptsPerStep = Annotated[
    int, typer.Option("--prompts-per-step", rich_help_panel=_RL, help="Groups of a step.")
]
NumSteps = Annotated[int, typer.Option("--steps", rich_help_panel=_RL, help="Of the whole run.")]
Recomputes = Annotated[
    bool,
    typer.Option(
        "--recompute/--no-recompute",
        rich_help_panel=_RL,
        help="Training computes activations twice: 4 forwards, not 3.",
    ),
]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Figure 1 (right) with ours.")
]


def cost(
    model: Model = "m1",
    gpu: GpuName = "h200",
    num_gpus: NumGpus = 8,
    price: Price = 3.0,
    mfu: Mfu = 0.4,
    bandwidth_share: Bandwidth = 0.7,
    weight_bits: WeightBits = 8,
    kv_bits: KvBits = 16,
    prompt_tokens: PromptTokens = 8192,
    output_tokens: OutputTokens = 65_536,
    concurrency: Concurrency = 32,
    rl_prompt_tokens: RlPromptTokens = 1024,
    rollout_tokens: RolloutTokens = 20_000,
    group_size: GroupSize = 16,
    prompts_per_step: PromptsPerStep = 32,
    num_steps: NumSteps = 4000,
    recomputes: Recomputes = True,
    plot: Plot = None,
    as_json: options.AsJson = False,
) -> None:
    """Computes what a model costs to serve and to train by RL, beside DeepSeek-R1 and Qwen3-235B.

    Nothing is measured and nothing is loaded but a config.json; the conventions are printed.
    """
    from m1serve.cost.machine import Machine
    from m1serve.cost.report import Question, make_report
    from m1serve.cost.rl import RlRun
    from m1serve.cost.serving import Workload
    from m1serve.cost.shape import Storage

    question = Question(
        name=_model_name(model),
        config=_read_model(model),
        storage=Storage(
            weight_itemsize=_itemsize("--weight-bits", weight_bits),
            kv_itemsize=_itemsize("--kv-bits", kv_bits),
        ),
        machine=Machine(
            gpu=_gpu(gpu),
            num_gpus=num_gpus,
            price_per_gpu_hour=price,
            mfu=mfu,
            bandwidth_share=bandwidth_share,
        ),
        load=Workload(
            prompt_tokens=prompt_tokens, output_tokens=output_tokens, concurrency=concurrency
        ),
        run=RlRun(
            prompt_tokens=rl_prompt_tokens,
            rollout_tokens=rollout_tokens,
            group_size=group_size,
            prompts_per_step=prompts_per_step,
            num_steps=num_steps,
            recomputes=recomputes,
        ),
    )
    _show(make_report(question), plot, as_json=as_json)


def _show(report: Report, plot: Path | None, *, as_json: bool) -> None:
    from m1serve.cli.cost_tables import print_report
    from m1serve.cli.cost_verdict import verdict

    if plot is not None:
        from m1serve.cli.cost_plot import write_plot

        write_plot(report, plot)
    if as_json:
        command = shlex.join(["m1serve", *sys.argv[1:]])
        print(json.dumps({"command": command, **report.to_json(), "verdict": verdict(report)}))
    else:
        print_report(report, wide_console())


def _model_name(model: str) -> str:
    known = {"m1": "MiniMax-M1", "slice": "M1's slice", "nano": "nano"}
    return known.get(model, Path(model).resolve().name)


def _read_model(model: str) -> M1Config:
    import m1serve.model
    from m1serve.cost.minimax import M1, SLICE
    from m1serve.model.directory import CONFIG_FILE, read_config

    if model == "m1":
        return M1
    if model == "slice":
        return SLICE
    if model == "nano":
        return read_config(Path(m1serve.model.__path__[0]) / "nano")
    path = Path(model)
    return read_config(path.parent if path.name == CONFIG_FILE else path)


def _itemsize(flag: str, bits: int) -> int:
    if bits not in (8, 16):
        raise ConfigError(f"{flag} is {bits}; wanted 8 or 16")
    return bits // 8


def _gpu(name: str) -> Gpu:
    from m1serve.cost.machine import GPUS

    if name.lower() not in GPUS:
        raise ConfigError(f"no GPU {name!r} here; wanted one of {', '.join(GPUS)}")
    return GPUS[name.lower()]
