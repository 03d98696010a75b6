"""TAU-bench: the clone's own run.py, or its agent under the protocol that MiniMax-M1 reports."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from m1serve.clients.harness.clone import Clone
from m1serve.clients.harness.process import Endpoint, harness_environment, run_program
from m1serve.clients.harness.report import Attempt, HarnessReport, newest
from m1serve.errors import ConfigError

RUNNER = Path(__file__).parent / "tau_m1_runner.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class TauPlan:
    agent: Endpoint
    user: Endpoint
    domain: str
    protocol: str = "stock"
    """stock, or m1: 40 steps, a prompt before the wiki, temperature 1.0 and top_p 0.95."""
    system_prompt: str | None = None
    tasks: tuple[int, ...] = ()
    """None means all."""
    trials: int = 1
    concurrency: int = 1


def run_tau(clone: Clone, python: Path, plan: TauPlan, out: Path) -> HarnessReport:
    """Plays the tasks; the harness's results and log are left in `out`."""
    is_apart = plan.user.base_url != plan.agent.base_url
    environment = harness_environment(
        plan.agent, python_path=clone.directory, user=plan.user if is_apart else None
    )
    user_provider = "hosted_vllm" if is_apart else "openai"
    command: list[str | Path] = [python, clone.directory / "run.py"]
    if plan.protocol == "m1":
        prompt_file = out / "system-prompt.txt"
        prompt_file.write_text(_m1_prompt(plan), encoding="utf-8")
        command = [python, RUNNER, "--prompt-file", prompt_file]
    else:
        command += ["--agent-strategy", "tool-calling", "--user-strategy", "llm"]
    command += ["--env", plan.domain, "--model", plan.agent.model, "--model-provider", "openai"]
    command += ["--user-model", plan.user.model, "--user-model-provider", user_provider]
    command += ["--num-trials", str(plan.trials), "--max-concurrency", str(plan.concurrency)]
    command += ["--log-dir", out / "results"]
    if plan.tasks:
        command += ["--task-ids", *map(str, plan.tasks)]
    (out / "results").mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    log_file = out / "harness.log"
    run_program(command, environment=environment, cwd=out, log_file=log_file)
    results = newest(out / "results", "*.json", log_file)
    return HarnessReport(
        harness=f"tau-bench {plan.domain}",
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
    rows = json.loads(results.read_text(encoding="utf-8"))
    return tuple(
        Attempt(task=str(r["task_id"]), reward=float(r["reward"]), error=r["info"].get("error"))
        for r in rows
    )


def _m1_prompt(plan: TauPlan) -> str:
    if not plan.system_prompt:
        raise ConfigError(
            "--protocol m1 puts MiniMax's general prompt of two lines before the wiki; it is not "
            "shipped here: copy it from the MiniMax-M1 README and give it with --system-prompt"
        )
    return plan.system_prompt
