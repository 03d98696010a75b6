"""Every kind of answer, read by real clients; openai-py always, the others where they are given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN = Path(__file__).parents[2] / "benchmarks" / "clients" / "run.py"
PYTHON = os.environ.get("TEST_CLIENTS_PYTHON")
NODE_DIR = os.environ.get("TEST_CLIENTS_NODE_DIR")
NO_PYTHON = "TEST_CLIENTS_PYTHON names no python with langchain-openai, openai-agents and litellm"
NO_NODE = "TEST_CLIENTS_NODE_DIR names no directory with @ai-sdk/openai-compatible installed"
NUM_KINDS = 35

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def read_all(name: str, *flags: str) -> dict[str, Any]:
    """The client's part of the report."""
    done = subprocess.run(
        [sys.executable, str(RUN), "--only", name, *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert len(report["kinds"]) == NUM_KINDS
    (client,) = report["clients"]
    assert isinstance(client, dict)
    return client


@pytest.mark.parametrize("name", ["openai-py, raw", "openai-py, helpers"])
def test_openai_py_gets_every_kind_of_answer_right(name: str) -> None:
    client = read_all(name)
    assert client["problems"] == {}
    assert client["passed"] == client["of"] == NUM_KINDS


@pytest.mark.skipif(PYTHON is None, reason=NO_PYTHON)
@pytest.mark.parametrize(
    "name", ["langchain-openai", "openai-agents", "litellm, openai", "litellm, hosted_vllm"]
)
def test_a_python_client_gets_every_kind_it_knows_right(name: str) -> None:
    client = read_all(name, "--python", str(PYTHON))
    assert client["problems"] == {}
    assert client["passed"] == client["of"] == NUM_KINDS - len(client["not_applicable"])


@pytest.mark.skipif(NODE_DIR is None, reason=NO_NODE)
def test_vercels_provider_gets_every_kind_it_knows_right() -> None:
    client = read_all("@ai-sdk", "--node-dir", str(NODE_DIR))
    assert client["problems"] == {}
    assert client["passed"] == client["of"] == NUM_KINDS - len(client["not_applicable"])
