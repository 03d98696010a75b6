"""`m1serve bench longcontext`: one model at length on one device, random weights, JSON out."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from m1serve.errors import ConfigError

Size = Annotated[
    str,
    typer.Option("--size", help="slice: eight layers of M1's widths; tiny: proves the program."),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Out = Annotated[Path | None, typer.Option("--out", help="File for the JSON (standard output).")]


def longcontext(size: Size = "slice", device: Device = "auto", out: Out = None) -> None:
    """Prefill, decode and snapshots of the local engine at up to a million tokens."""
    import torch

    from m1serve.engine.launch import serving_device
    from m1serve.engine.longcontext.run import run, slice_plan, tiny_plan

    plans = {"slice": slice_plan, "tiny": tiny_plan}
    if size not in plans:
        raise ConfigError(f"--size is {size!r}; wanted one of {sorted(plans)}")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    on = torch.device(serving_device(device))
    dtype = torch.bfloat16 if on.type == "cuda" else torch.float32
    command = shlex.join(["m1serve", *sys.argv[1:]])

    def save(result: dict[str, Any]) -> None:
        if out is not None:
            out.write_text(json.dumps({"command": command, **result}, indent=1) + "\n")

    result = run(plans[size](), device=on, dtype=dtype, save=save)
    if out is None:
        print(json.dumps({"command": command, **result}, indent=1))
