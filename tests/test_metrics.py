"""The metrics page, of one process and of several that share a directory."""

import subprocess
import sys
from pathlib import Path

from m1serve.metrics import Metrics


def test_a_label_that_is_gone_is_shown_as_zero() -> None:
    metrics = Metrics()
    metrics.show(metrics.jobs, {"queued": 2})
    metrics.show(metrics.jobs, {"done": 1})
    text = metrics.exposition().decode()
    assert 'm1serve_jobs{state="queued"} 0.0' in text
    assert 'm1serve_jobs{state="done"} 1.0' in text


def test_processes_that_share_a_directory_are_summed(tmp_path: Path) -> None:
    count = "from m1serve.metrics import Metrics; m = Metrics(); m.completion_tokens.inc(5)"
    show = "; m.slots.set(8); print(m.exposition().decode())"
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    run = [sys.executable, "-c"]
    subprocess.run([*run, count], env=environment, check=True)
    done = subprocess.run(
        [*run, count + show], env=environment, check=True, capture_output=True, text=True
    )
    assert "m1serve_completion_tokens_total 10.0" in done.stdout
    assert "m1serve_engine_slots 8.0" in done.stdout
