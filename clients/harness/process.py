"""Runs a harness's own programs: where they find the endpoint, and nothing from the network."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from m1serve.errors import ConfigError

_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "SSL_CERT_FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    base_url: str
    """Ends in /v1."""
    api_key: str
    model: str


def harness_environment(
    endpoint: Endpoint, *, python_path: Path, user: Endpoint | None = None
) -> dict[str, str]:
    """Of a child. A user model on a server of its own is reached by litellm's hosted_vllm."""
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    environment |= {
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_BASE": endpoint.base_url,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PYTHONPATH": str(python_path),
        # nothing of ours is left in the user's clone
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUTF8": "1",
    }
    if user is not None:
        environment |= {
            "HOSTED_VLLM_API_BASE": user.base_url,
            "HOSTED_VLLM_API_KEY": user.api_key,
        }
    return environment


def run_program(
    command: Sequence[str | Path], *, environment: Mapping[str, str], cwd: Path, log_file: Path
) -> None:
    """Raises ConfigError with the end of its log when it fails."""
    with log_file.open("ab") as log:
        done = subprocess.run(
            [str(part) for part in command],
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=False,
        )
    if done.returncode != 0:
        end = log_file.read_text(errors="replace")[-1500:]
        raise ConfigError(f"{command[1]} ended with {done.returncode}; {log_file} ends:\n{end}")
