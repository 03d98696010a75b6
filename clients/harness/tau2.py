"""tau2-bench: the clone's own command line, with the agent and the user on servers of their own."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from m1serve.clients.harness.clone import Clone
from m1serve.clients.harness.process import Endpoint, harness_environment, run_program
from m1serve.clients.harness.report import Attempt, HarnessReport, newest
from m1serve.errors import ConfigError

STARTER = "from tau2.cli import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tau2Plan:
    agent: Endpoint
    user: Endpoint
    domain: str
    protocol: str = "stock"
    """stock, or m1: temperature 1.0 and top_p 0.95 for the agent."""
    tasks: tuple[str, ...] = ()
    """Ids; none means all of the base split."""
    trials: int = 1
    concurrency: int = 1


def run_tau2(clone: Clone, python: Path, plan: Tau2Plan, out: Path) -> HarnessReport:
    """The simulations are kept under `out`, not in the clone's data directory."""
    environment = harness_environment(plan.agent, python_path=clone.directory / "src")
    environment["TAU2_DATA_DIR"] = str(_data_dir(clone, out))
    sampling: dict[str, object] = {"temperature": 0.0}
    if plan.protocol == "m1":
        sampling = {"temperature": 1.0, "top_p": 0.95}
    command: list[str | Path] = [python, "-c", STARTER, "run", "--domain", plan.domain]
    for role, endpoint in (("agent", plan.agent), ("user", plan.user)):
        where = {"api_base": endpoint.base_url, "api_key": endpoint.api_key}
        command += [f"--{role}-llm", f"openai/{endpoint.model}"]
        command += [f"--{role}-llm-args", json.dumps(sampling | where)]
        sampling = {"temperature": 0.0}
    command += ["--num-trials", str(plan.trials), "--max-concurrency", str(plan.concurrency)]
    command += ["--save-to", "m1serve"]
    if plan.tasks:
        command += ["--task-ids", *plan.tasks]
    started = time.monotonic()
    log_file = out / "harness.log"
    run_program(command, environment=environment, cwd=out, log_file=log_file)
    results = newest(out / "data" / "simulations", "m1serve*/results.json", log_file)
    return HarnessReport(
        harness=f"tau2-bench {plan.domain}",
        commit=clone.commit,
        protocol=plan.protocol,
        model=plan.agent.model,
        user_model=plan.user.model,
        attempts=read_attempts(results),
        wall_s=time.monotonic() - started,
        results=str(results),
        warning=clone.warning,
    )


def read_attempts(results: Path) -> tuple[Attempt, ...]:
    """A simulation without a verdict counts as 0, and says how it ended."""
    simulations = json.loads(results.read_text(encoding="utf-8"))["simulations"]
    if not simulations:
        raise ConfigError(f"{results} holds no simulation; see harness.log beside it")
    attempts = []
    for simulation in simulations:
        info = simulation.get("reward_info") or {}
        ended = str(simulation.get("termination_reason"))
        is_whole = ended in ("user_stop", "agent_stop")
        attempts.append(
            Attempt(
                task=str(simulation["task_id"]),
                reward=float(info.get("reward") or 0.0),
                error=None if is_whole else f"ended by {ended}",
            )
        )
    return tuple(attempts)


def _data_dir(clone: Clone, out: Path) -> Path:
    """The clone's data by links, so that what is written lies in `out`."""
    data = out / "data"
    (data / "simulations").mkdir(parents=True, exist_ok=True)
    for entry in (clone.directory / "data").iterdir():
        link = data / entry.name
        if entry.name != "simulations" and not link.exists():
            link.symlink_to(entry)
    return data
