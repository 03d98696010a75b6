"""The user's clones and the interpreters that run them: what is wanted, and whether it is there."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx

from m1serve.errors import ConfigError

CACHE = Path("~/.cache/m1serve/harness")
INSTALL_S = 1800
PROBE_S = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    name: str
    repository: str
    commit: str
    """The one that all of this was tried with."""
    files: tuple[str, ...]
    """A directory that has them is taken for a clone."""
    requirements: tuple[str, ...]
    modules: tuple[str, ...]
    """Imported to see whether an interpreter will do."""


TAU = Harness(
    name="tau",
    repository="https://github.com/sierra-research/tau-bench",
    commit="59a200c6d575d595120f1cb70fea53cef0632f6b",
    files=("run.py", "tau_bench/agents/tool_calling_agent.py", "tau_bench/envs/user.py"),
    requirements=(
        "litellm==1.110.2",
        "openai==3.57.0",
        "mistralai==3.7.0",
        "anthropic==2.14.0",
        "google-generativeai==0.8.6",
        "tenacity==9.2.1",
        "termcolor==3.3.0",
        "numpy==2.4.6",
    ),
    modules=("litellm", "termcolor", "tenacity"),
)
TAU2 = Harness(
    name="tau2",
    repository="https://github.com/sierra-research/tau2-bench",
    commit="a2c024725189473d2d7cea3a5cfdbcc67478e41f",
    files=("src/tau2/cli.py", "data/tau2/domains/retail/tasks.json"),
    requirements=(
        *("litellm==1.82.6", "rich==15.0.0", "tabulate==0.10.0", "fastapi==0.165.0"),
        *("uvicorn==0.54.0", "pandas==3.1.1", "psutil==7.2.2", "loguru==0.7.3"),
        *("docstring-parser==0.18.0", "tenacity==9.2.1", "deepdiff==9.1.0", "addict==2.4.0"),
        *("PyYAML==6.0.4", "toml==0.10.2", "python-dotenv==1.2.4", "typer==0.29.2"),
        *("requests==2.34.2", "numpy==2.4.6"),
    ),
    modules=("litellm", "loguru", "deepdiff", "addict"),
)
AGENTLESS = Harness(
    name="agentless",
    repository="https://github.com/OpenAutoCoder/Agentless",
    commit="5ce5888b9f149beaace393957a55ea8ee46c9f71",
    files=("agentless/fl/localize.py", "agentless/repair/repair.py", "agentless/repair/rerank.py"),
    requirements=(
        *("anthropic==2.14.0", "openai==3.57.0", "datasets==5.2.0", "tiktoken==0.14.0"),
        *("libcst==1.9.0", "jsonlines==4.0.0", "pandas==3.1.1", "llama-index-core==0.14.25"),
        "llama-index-embeddings-openai==0.7.0",
    ),
    modules=("openai", "datasets", "libcst", "tiktoken", "llama_index.core"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clone:
    directory: Path
    commit: str | None
    warning: str | None


def check_clone(directory: Path, harness: Harness) -> Clone:
    """Raises ConfigError when it is none; warns about commits that nobody tried."""
    missing = [name for name in harness.files if not (directory / name).is_file()]
    if missing:
        raise ConfigError(
            f"{directory} is no clone of {harness.name}: {', '.join(missing)} missing; "
            f"git clone {harness.repository} && git checkout {harness.commit}"
        )
    directory = directory.resolve()
    asked = subprocess.run(
        ["git", "-C", str(directory), "rev-parse", "--show-toplevel", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    top, _, commit = asked.stdout.strip().partition("\n")
    if asked.returncode != 0 or Path(top).resolve() != directory:
        unknown = f"{directory} is not a git checkout, so its commit is not known"
        return Clone(directory=directory, commit=None, warning=f"{unknown}; {_tried(harness)}")
    warning = None if commit == harness.commit else f"{directory} is at {commit}; {_tried(harness)}"
    return Clone(directory=directory, commit=commit, warning=warning)


def harness_python(harness: Harness, python: Path | None, *, cache: Path = CACHE) -> Path:
    """The given interpreter, or that of a cached venv, which is made if need be.

    Raises ConfigError when it cannot import what the harness needs.
    """
    if python is None:
        home = cache.expanduser() / f"{harness.name}-{harness.commit[:12]}"
        python = home / "bin" / "python"
        if not (home / "complete").is_file():
            _make_venv(home, harness)
    python = python.absolute()
    if not python.is_file():
        raise ConfigError(f"no interpreter at {python}; give --python one with {harness.modules}")
    code = f"import {', '.join(harness.modules)}"
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PATH": "/usr/bin:/bin"}
    probe = [str(python), "-c", code]
    done = subprocess.run(
        probe, env=environment, capture_output=True, text=True, check=False, timeout=PROBE_S
    )
    if done.returncode != 0:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(
            f"{python} cannot run {harness.name}: {reason}; install into it: "
            f"pip install {' '.join(repr(r) for r in harness.requirements)}"
        )
    return python


def check_endpoint(base_url: str, api_key: str, model: str) -> None:
    """Raises ConfigError when nothing answers there or the model is not among what is served."""
    url = f"{base_url.rstrip('/')}/models"
    try:
        answer = httpx.get(url, headers={"Authorization": f"Bearer {api_key}"}, timeout=30)
        answer.raise_for_status()
        names = [str(card["id"]) for card in answer.json()["data"]]
    except httpx.HTTPStatusError as error:
        raise ConfigError(f"{url} answered {error.response.status_code}; check --api-key") from None
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"no OpenAI endpoint at {base_url} ({type(error).__name__}: {error}); start one "
            "(`m1serve serve`) or give its --base-url, which ends in /v1"
        ) from None
    if model not in names:
        raise ConfigError(
            f"{base_url} does not serve {model!r}, only {', '.join(names)}; give one of these, or "
            f"the server an alias: --set 'model.aliases=[\"{model}\"]'"
        )


def _tried(harness: Harness) -> str:
    return f"{harness.commit} is the one that was tried"


def _make_venv(home: Path, harness: Harness) -> None:
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(home)],
        [*pip, *harness.requirements],
    ):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=INSTALL_S
        )
        if done.returncode != 0:
            raise ConfigError(
                f"could not make {home} for {harness.name}: {done.stderr.strip()[-500:]}; "
                "give --python an interpreter that has its requirements"
            )
    (home / "complete").touch()
