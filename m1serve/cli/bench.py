"""`m1serve bench`: public benchmarks from the user's own clones against a running server."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from m1serve.cli.bench_longcontext import longcontext
from m1serve.cli.bench_parity import parity
from m1serve.errors import ConfigError

if TYPE_CHECKING:
    from m1serve.clients.harness.clone import Clone, Harness
    from m1serve.clients.harness.process import Endpoint

app = typer.Typer(
    help="Public benchmarks from your own clones: tau, tau2, agentless. Of this engine: "
    "longcontext, parity.",
    no_args_is_help=True,
)
app.command()(longcontext)
app.command()(parity)
Dir = Annotated[Path, typer.Option("--dir", help="Your clone; it is read and never written.")]
Python = Annotated[
    Path | None,
    typer.Option("--python", help="Interpreter with its requirements (default: a cached venv)."),
]
BaseUrl = Annotated[str, typer.Option("--base-url", help="Of the server; ends in /v1.")]
ApiKey = Annotated[str, typer.Option("--api-key", envvar="OPENAI_API_KEY")]
Model = Annotated[str, typer.Option("--model", help="The agent.")]
UserModel = Annotated[
    str | None, typer.Option("--user-model", help="Plays the user (default: the agent's).")
]
UserBaseUrl = Annotated[
    str | None, typer.Option("--user-base-url", help="Server of the user model, if another.")
]
UserApiKey = Annotated[str | None, typer.Option("--user-api-key")]
Protocol = Annotated[
    str, typer.Option("--protocol", help="stock, or m1: the setting that MiniMax-M1 reports.")
]
Tasks = Annotated[str, typer.Option("--tasks", help="Ids with commas between them (all).")]
Trials = Annotated[int, typer.Option("--trials", min=1)]
Concurrency = Annotated[int, typer.Option("--concurrency", min=1)]
Out = Annotated[
    Path | None, typer.Option("--out", help="Where results and logs go (bench-<name>-<time>).")
]
DEFAULT_URL = "http://127.0.0.1:8000/v1"


@app.command()
def tau(
    directory: Dir,
    domain: Annotated[str, typer.Option("--domain", help="retail or airline.")] = "retail",
    protocol: Protocol = "stock",
    system_prompt: Annotated[
        Path | None, typer.Option("--system-prompt", help="File; goes before the wiki (m1).")
    ] = None,
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = "none",
    model: Model = "nano",
    user_model: UserModel = None,
    user_base_url: UserBaseUrl = None,
    user_api_key: UserApiKey = None,
    tasks: Tasks = "",
    trials: Trials = 1,
    concurrency: Concurrency = 1,
    python: Python = None,
    out: Out = None,
) -> None:
    """TAU-bench."""
    from m1serve.clients.harness.clone import TAU
    from m1serve.clients.harness.report import write_report
    from m1serve.clients.harness.tau import TauPlan, run_tau

    _one_of("--domain", domain, ("retail", "airline"))
    user = (user_base_url, user_api_key, user_model)
    ready = _prepare(TAU, directory, protocol, python, (base_url, api_key, model), user, out)
    plan = TauPlan(
        agent=ready.agent,
        user=ready.user,
        domain=domain,
        protocol=protocol,
        system_prompt=_read(system_prompt),
        tasks=tuple(_number(task) for task in _ids(tasks)),
        trials=trials,
        concurrency=concurrency,
    )
    report = run_tau(ready.clone, ready.python, plan, ready.out)
    write_report(report, ready.out)
    print(json.dumps(report.as_json()))


@app.command()
def tau2(
    directory: Dir,
    domain: Annotated[str, typer.Option("--domain", help="As tau2 names them.")] = "retail",
    protocol: Protocol = "stock",
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = "none",
    model: Model = "nano",
    user_model: UserModel = None,
    user_base_url: UserBaseUrl = None,
    user_api_key: UserApiKey = None,
    tasks: Tasks = "",
    trials: Trials = 1,
    concurrency: Concurrency = 1,
    python: Python = None,
    out: Out = None,
) -> None:
    """tau2-bench. Its judge is gpt-4.1-2025-04-14 on the agent's server: give it that alias."""
    from m1serve.clients.harness.clone import TAU2
    from m1serve.clients.harness.report import write_report
    from m1serve.clients.harness.tau2 import Tau2Plan, run_tau2

    user = (user_base_url, user_api_key, user_model)
    ready = _prepare(TAU2, directory, protocol, python, (base_url, api_key, model), user, out)
    plan = Tau2Plan(
        agent=ready.agent,
        user=ready.user,
        domain=domain,
        protocol=protocol,
        tasks=_ids(tasks),
        trials=trials,
        concurrency=concurrency,
    )
    report = run_tau2(ready.clone, ready.python, plan, ready.out)
    write_report(report, ready.out)
    print(json.dumps(report.as_json()))


@app.command()
def agentless(
    directory: Dir,
    instances: Annotated[
        Path, typer.Option("--instances", help="JSON lines as SWE-bench's, each with repo_dir.")
    ],
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = "none",
    model: Model = "gpt-4o-2024-05-13",
    python: Python = None,
    out: Out = None,
) -> None:
    """Agentless: localise, repair, rerank; patches are judged by the instance's own check."""
    from m1serve.clients.harness.agentless import read_instances, run_agentless
    from m1serve.clients.harness.clone import AGENTLESS

    todo = read_instances(instances)
    own = (base_url, api_key, model)
    ready = _prepare(AGENTLESS, directory, "stock", python, own, (None, None, None), out)
    report = run_agentless(ready.clone, ready.python, ready.agent, todo, ready.out)
    text = json.dumps(report.as_json())
    (ready.out / "report.json").write_text(text + "\n", encoding="utf-8")
    print(text)


@app.command()
def script(
    harness: Annotated[str, typer.Argument(help="tau, tau2 or agentless (our toy repository).")],
    directory: Annotated[Path, typer.Option("--dir", help="The clone the answers are in.")],
    domain: Annotated[str, typer.Option("--domain")] = "retail",
    mutate: Annotated[
        int, typer.Option("--mutate", min=0, help="tau: first tasks that get a wrong write.")
    ] = 0,
) -> None:
    """Prints answers for the scripted engine (engine.kind=scripted, engine.script=FILE)."""
    from m1serve.clients.harness.agentless_script import agentless_script
    from m1serve.clients.harness.play import script_text
    from m1serve.clients.harness.tau2_script import tau2_script
    from m1serve.clients.harness.tau_script import tau_script

    _one_of("HARNESS", harness, ("tau", "tau2", "agentless"))
    if harness == "tau":
        _one_of("--domain", domain, ("retail", "airline"))
        lines = tau_script(directory, domain, num_mutated=mutate)
    else:
        lines = tau2_script(directory, domain) if harness == "tau2" else agentless_script()
    print(script_text(lines), end="")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    clone: Clone
    python: Path
    agent: Endpoint
    user: Endpoint
    out: Path


def _prepare(
    harness: Harness,
    directory: Path,
    protocol: str,
    python: Path | None,
    own: tuple[str, str, str],
    user: tuple[str | None, str | None, str | None],
    out: Path | None,
) -> _Ready:
    """Everything that can be wrong is found before the harness starts."""
    from m1serve.clients.harness.clone import check_clone, check_endpoint, harness_python
    from m1serve.clients.harness.process import Endpoint

    _one_of("--protocol", protocol, ("stock", "m1"))
    clone = check_clone(directory, harness)
    if clone.warning:
        print(f"m1serve: {clone.warning}", file=sys.stderr)
    agent = Endpoint(base_url=own[0], api_key=own[1], model=own[2])
    player = Endpoint(
        base_url=user[0] or own[0], api_key=user[1] or own[1], model=user[2] or own[2]
    )
    for endpoint in {agent, player}:
        check_endpoint(endpoint.base_url, endpoint.api_key, endpoint.model)
    interpreter = harness_python(harness, python)
    out = (out or Path(f"bench-{harness.name}-{time.strftime('%Y%m%d-%H%M%S')}")).absolute()
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out} is not empty; give another")
    out.mkdir(parents=True, exist_ok=True)
    return _Ready(clone=clone, python=interpreter, agent=agent, user=player, out=out)


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{option} must be one of {', '.join(known)}, got {value!r}")


def _read(file: Path | None) -> str | None:
    if file is not None and not file.is_file():
        raise ConfigError(f"--system-prompt {file} is no file")
    return None if file is None else file.read_text(encoding="utf-8")


def _ids(tasks: str) -> tuple[str, ...]:
    return tuple(task.strip() for task in tasks.split(",") if task.strip())


def _number(task: str) -> int:
    if not task.isdecimal():
        raise ConfigError(f"--tasks of tau are numbers, got {task!r}")
    return int(task)
