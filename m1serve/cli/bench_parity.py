"""`m1serve bench parity`: do training and serving agree on one model, on one device? JSON out."""

from __future__ import annotations

import json
import math
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from m1serve.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from m1serve.model.parity import ParityReport
    from m1serve.model.parity_random import RandomRun

Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="nano|slice|DIR",
        help="slice: eight layers of M1's widths, random weights made on the device.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Dtype = Annotated[
    str, typer.Option("--dtype", help="auto (bfloat16 on CUDA, else float32), bfloat16, float32.")
]
Rows = Annotated[int, typer.Option("--rows", min=1, help="Sequences served at once.")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Sampled in each row and compared.")]
Prompt = Annotated[
    int, typer.Option("--prompt-tokens", min=1, help="Of a slice's random prompt; else a task's.")
]
Chunk = Annotated[
    int, typer.Option("--chunk", min=1, help="Prompt tokens that serving reads at once.")
]
HeadScale = Annotated[
    float, typer.Option("--head-scale", help="Of a slice's head: 1 leaves it nearly flat.")
]
Seed = Annotated[int, typer.Option("--seed", help="Of random weights, prompts and samples.")]
Out = Annotated[Path | None, typer.Option("--out", help="File for the JSON (standard output).")]


def parity(
    model: Model = "nano",
    device: Device = "auto",
    dtype: Dtype = "auto",
    rows: Rows = 8,
    tokens: Tokens = 128,
    prompt_tokens: Prompt = 1024,
    chunk: Chunk = 256,
    head_scale: HeadScale = 4.0,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Training's log-probabilities of tokens against those of serving, which sampled them."""
    import torch

    from m1serve.model.parity_random import RandomRun, random_parity
    from m1serve.model.slice import slice_config

    on, kind = _placed(device, dtype)
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: {out.parent} is no directory; make it first")
    run = RandomRun(
        rows=rows,
        prompt_tokens=prompt_tokens,
        sampled_tokens=tokens,
        chunk=chunk,
        head_scale=head_scale,
        seed=seed,
    )
    if model == "slice":
        report = random_parity(slice_config(), run, device=on, dtype=kind)
    else:
        run, report = _of_directory(model, run, on, kind)
    setting = {
        "model": model,
        "device": _device_name(on),
        "torch": torch.__version__,
        "dtype": str(kind).removeprefix("torch."),
    }
    _write(setting | asdict(run), report, out)


def _placed(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device must be one of auto, cpu, cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here; give --device cpu")
    kinds = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if dtype not in ("auto", *kinds):
        raise ConfigError(f"--dtype must be one of auto, {', '.join(kinds)}, got {dtype!r}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    by_device = torch.bfloat16 if device == "cuda" else torch.float32
    return torch.device(device), kinds.get(dtype, by_device)


def _of_directory(
    name: str, run: RandomRun, device: torch.device, dtype: torch.dtype
) -> tuple[RandomRun, ParityReport]:
    """A model directory, with a task of ours as the prompt of every row; and what was run."""
    import torch

    import m1serve.model
    from m1serve.chat.messages import ChatMessage
    from m1serve.chat.template import encode_prompt
    from m1serve.chat.tokenizer import ChatTokenizer
    from m1serve.envs.base import make_task, task_ids
    from m1serve.model.checkpoint import load_model
    from m1serve.model.parity import chunk_lengths, measure_parity, serve

    path = Path(m1serve.model.__path__[0]) / "nano" if name == "nano" else Path(name)
    if not path.is_dir():
        raise ConfigError(f"--model {name} is neither nano, slice nor a directory")
    task = make_task(task_ids("report", "compare", 1, run.seed)[0])
    messages = [
        ChatMessage(role="system", content=task.system),
        ChatMessage(role="user", content=task.user),
    ]
    ids = encode_prompt(ChatTokenizer.load(path), messages, task.tools).ids
    model = load_model(path, device=device, dtype=dtype)
    prompt_BP = torch.tensor(ids, device=device).expand(run.rows, -1)
    generator = torch.Generator(device=device).manual_seed(run.seed)
    chunks = chunk_lengths(len(ids), run.chunk)
    served = serve(model, prompt_BP, run.sampled_tokens, chunks=chunks, generator=generator)
    report = measure_parity(model, served, prompt=len(ids))
    return replace(run, prompt_tokens=len(ids), head_scale=1.0), report


def _device_name(device: torch.device) -> str:
    from m1serve.model.devices import device_of

    found = device_of(device)
    return str(device) if found is None else found.model


def _without_nan(value: object) -> object:
    """null where there was nothing to compute from: JSON has no NaN."""
    match value:
        case float() if math.isnan(value):
            return None
        case dict():
            return {key: _without_nan(part) for key, part in value.items()}
        case list() | tuple():
            return [_without_nan(part) for part in value]
    return value


def _write(setting: dict[str, object], report: ParityReport, out: Path | None) -> None:
    command = shlex.join(["m1serve", *sys.argv[1:]])
    whole = {"command": command, **setting, **asdict(report)}
    text = json.dumps(_without_nan(whole), indent=1)
    if out is None:
        print(text)
    else:
        out.write_text(text + "\n", encoding="utf-8")
