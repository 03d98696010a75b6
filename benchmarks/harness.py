"""Genuine TAU-bench, tau2-bench and Agentless against a server that knows the answers.

    python benchmarks/harness.py --tau DIR --tau2 DIR --agentless DIR [--out FILE]

The directories are clones of the user's. The server is `m1serve serve` with the scripted engine,
whose answers are the clones' own ground truth; what is proved is the endpoint and the ledger, not a
model. `session_accuracy`: of the agent's turns in TAU-bench retail's own logs at concurrency 32,
without any session header, the share that the ledger keeps in one session of that episode alone.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.cli import options
from m1serve.clients.harness.agentless import MODELS, read_instances, run_agentless
from m1serve.clients.harness.agentless_script import agentless_script
from m1serve.clients.harness.clone import (
    AGENTLESS,
    TAU,
    TAU2,
    Harness,
    check_clone,
    harness_python,
)
from m1serve.clients.harness.play import script_text
from m1serve.clients.harness.process import Endpoint
from m1serve.clients.harness.report import HarnessReport
from m1serve.clients.harness.tau import TauPlan, run_tau
from m1serve.clients.harness.tau2 import Tau2Plan, run_tau2
from m1serve.clients.harness.tau2_script import tau2_script
from m1serve.clients.harness.tau_script import tau_script
from m1serve.clients.local_server import LocalServer

ROOT = Path(__file__).parent.parent
TOY = ROOT / "tests" / "clients" / "toy_shapes" / "instances.jsonl"
ALIASES = ("user-sim", "gpt-4.1-2025-04-14", MODELS[0])
SESSION_CONCURRENCY = 32
NUM_MUTATED = 3
INGEST_S = 300.0
MARKER = re.compile(r"user\nTASK retail (\d+) :")


def main() -> None:
    arguments = _arguments()
    command = "python benchmarks/harness.py " + " ".join(_shown(arguments))
    found: dict[str, object] = {"command": command}
    if arguments.only_tau2 and arguments.out.is_file():
        found = json.loads(arguments.out.read_text(encoding="utf-8"))
        found["tau2_command"] = command

    def keep(name: str, value: object) -> None:
        found[name] = value
        print(json.dumps({name: value}), flush=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="m1serve-harness-") as directory:
        prove(arguments, Path(directory), keep)


def prove(
    arguments: argparse.Namespace, scratch: Path, keep: Callable[[str, object], None]
) -> None:
    lines = [tau_script(arguments.tau, domain) for domain in ("retail", "airline")]
    lines += [tau2_script(arguments.tau2, domain) for domain in ("mock", "retail")]
    texts = [script_text(part) for part in (*lines, agentless_script())]
    server = _start(scratch / "oracle", "".join(texts), with_ray=arguments.ray)
    try:
        if not arguments.only_tau2:
            _prove_others(arguments, server, scratch, keep)
        mock = _tau2(arguments, server, "mock", scratch / "m")
        keep("tau2", {"mock": _short(mock)})
        retail = _tau2(arguments, server, "retail", scratch / "t")
        keep("tau2", {"mock": _short(mock), "retail": _short(retail)})
    finally:
        server.stop()


def _prove_others(
    arguments: argparse.Namespace,
    server: LocalServer,
    scratch: Path,
    keep: Callable[[str, object], None],
) -> None:
    report = _tau(arguments, server, "retail", scratch / "r", concurrency=SESSION_CONCURRENCY)
    keep("tau_retail", _short(report))
    sessions = _sessions(scratch / "oracle", Path(report.results))
    keep("session_accuracy", sessions["accuracy"])
    keep("sessions", sessions)
    keep("tau_airline", _short(_tau(arguments, server, "airline", scratch / "a")))
    keep("tau_mutated", _mutated(arguments, scratch))
    keep("agentless", _agentless(arguments, server, scratch / "g"))


def _tau(
    arguments: argparse.Namespace,
    server: LocalServer,
    domain: str,
    out: Path,
    *,
    concurrency: int = 4,
    tasks: tuple[int, ...] = (),
) -> HarnessReport:
    out.mkdir()
    plan = TauPlan(
        agent=_endpoint(server, "nano"),
        user=_endpoint(server, "user-sim"),
        domain=domain,
        concurrency=concurrency,
        tasks=tasks,
    )
    python = harness_python(TAU, arguments.tau_python)
    return run_tau(check_clone(arguments.tau, TAU), python, plan, out)


def _tau2(
    arguments: argparse.Namespace, server: LocalServer, domain: str, out: Path
) -> HarnessReport:
    out.mkdir()
    plan = Tau2Plan(
        agent=_endpoint(server, "nano"),
        user=_endpoint(server, "user-sim"),
        domain=domain,
        concurrency=4,
    )
    python = harness_python(TAU2, arguments.tau2_python)
    return run_tau2(check_clone(arguments.tau2, TAU2), python, plan, out)


def _mutated(arguments: argparse.Namespace, scratch: Path) -> dict[str, object]:
    text = script_text(tau_script(arguments.tau, "retail", num_mutated=NUM_MUTATED))
    server = _start(scratch / "spoiled", text, with_ray=False)
    try:
        tasks = tuple(range(NUM_MUTATED))
        return _short(_tau(arguments, server, "retail", scratch / "w", tasks=tasks))
    finally:
        server.stop()


def _agentless(arguments: argparse.Namespace, server: LocalServer, out: Path) -> dict[str, object]:
    out.mkdir()
    python = harness_python(AGENTLESS, arguments.agentless_python)
    clone = check_clone(arguments.agentless, AGENTLESS)
    endpoint = _endpoint(server, MODELS[0])
    report = run_agentless(clone, python, endpoint, read_instances(TOY), out).as_json()
    return {key: report[key] for key in ("patch_correct", "instances", "patched", "wall_s")}


def _sessions(home: Path, results: Path) -> dict[str, object]:
    """Against the harness's own logs; what was never ingested counts as wrong."""
    _ingest(home / "home")
    sessions = _sessions_by_episode(home / "home")
    episodes: dict[str, list[int]] = {}
    for row in json.loads(results.read_text(encoding="utf-8")):
        marker = MARKER.search("user\n" + str(row["traj"][1]["content"]))
        assert marker is not None, "an episode began without its marker"
        turns = sum(message["role"] == "assistant" for message in row["traj"])
        # tasks of the same words are the same conversation: any of its sessions is right for each
        episodes.setdefault(marker[1], []).append(turns)
    mixed = Counter(session for kept in sessions.values() for session in kept)
    right = 0
    for name, lengths in episodes.items():
        pure = [n for s, n in sessions.get(name, Counter()).most_common() if mixed[s] == 1]
        right += sum(min(*pair) for pair in zip(sorted(lengths, reverse=True), pure, strict=False))
    total = sum(map(sum, episodes.values()))
    return {
        "accuracy": right / total,
        "turns_right": right,
        "turns": total,
        "episodes": sum(map(len, episodes.values())),
        "sessions": len(mixed),
        "mixed_sessions": sum(n > 1 for n in mixed.values()),
        "concurrency": SESSION_CONCURRENCY,
    }


def _sessions_by_episode(home: Path) -> dict[str, Counter[str]]:
    """How many turns of the agent each session holds, by the marker in their prompts."""
    settings = options.read_settings(home=home)
    found: dict[str, Counter[str]] = {}
    with sqlite3.connect(home / "m1serve.db") as db:
        turn_ids = [row[0] for row in db.execute("SELECT turn_id FROM turns")]
    tokenizer = None
    with options.open_store(settings) as store:
        for turn_id in turn_ids:
            turn = store.ledger.turn(turn_id)
            if tokenizer is None:
                version = store.weights.list()[0]
                tokenizer = ChatTokenizer.load(Path(version.path) / "serving")
            marker = MARKER.search(tokenizer.decode(turn.prompt_ids))
            if marker is not None:
                found.setdefault(marker[1], Counter())[turn.session_id] += 1
    return found


def _ingest(home: Path) -> None:
    """Runs the sidecar until it moves nothing more."""
    command = [sys.executable, "-P", "-m", "m1serve.cli", "sidecar", "--home", str(home)]
    sidecar = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline, seen, quiet = time.monotonic() + INGEST_S, -1, 0
    try:
        while quiet < 5 and time.monotonic() < deadline:
            time.sleep(2)
            with sqlite3.connect(home / "m1serve.db", timeout=30) as db:
                count = db.execute("SELECT count(*) FROM turns").fetchone()[0]
            quiet = quiet + 1 if count == seen and count > 0 else 0
            seen = count
    finally:
        sidecar.send_signal(signal.SIGTERM)
        sidecar.wait(60)


def _start(home: Path, script: str, *, with_ray: bool) -> LocalServer:
    home.mkdir()
    file = home / "script.jsonl"
    file.write_text(script, encoding="utf-8")
    settings = {
        "engine.kind": "scripted",
        "engine.script": str(file),
        "engine.max_model_len": "131072",
        "model.aliases": json.dumps(list(ALIASES)),
    }
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    server = LocalServer(home, flags=flags if with_ray else [*flags, "--no-ray"])
    server.wait_until_ready()
    return server


def _endpoint(server: LocalServer, model: str) -> Endpoint:
    return Endpoint(base_url=f"{server.url}/v1", api_key="none", model=model)


def _short(report: HarnessReport) -> dict[str, object]:
    failed = [attempt.task for attempt in report.attempts if attempt.reward < 1]
    return {
        "tasks": report.num_tasks,
        "reward": report.reward,
        "failed": failed,
        "errors": sum(attempt.error is not None for attempt in report.attempts),
        "wall_s": round(report.wall_s, 1),
    }


def _shown(arguments: argparse.Namespace) -> list[str]:
    flags = {"--ray": arguments.ray, "--only-tau2": arguments.only_tau2}
    chosen = (flag for flag, is_given in flags.items() if is_given)
    return ["--tau DIR", "--tau2 DIR", "--agentless DIR", *chosen]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    harnesses: tuple[Harness, ...] = (TAU, TAU2, AGENTLESS)
    for harness in harnesses:
        parser.add_argument(f"--{harness.name}", type=Path, required=True)
        parser.add_argument(f"--{harness.name}-python", type=Path)
    parser.add_argument("--ray", action="store_true", help="the server under Ray Serve")
    parser.add_argument("--only-tau2", action="store_true", help="into the results there are")
    default = ROOT / "benchmarks" / "results" / "harness.json"
    parser.add_argument("--out", type=Path, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
