"""The program as a user meets it: light help, one line and exit code 2 for what cannot work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from m1serve import __version__
from m1serve.config import Settings
from m1serve.store import Store
from m1serve.types import Slot, VersionState

HEAVY = ("torch", "ray", "celery", "sqlalchemy", "fastapi", "openai", "numpy", "matplotlib")
COMMANDS = (
    "up",
    "serve",
    "worker",
    "trainer",
    "sidecar",
    "retrain",
    "runs",
    "sft",
    "weights",
    "trajectories",
    "keys",
    "chat",
    "demo",
    "doctor",
    "cost",
)


def m1serve(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("M1SERVE_")}
    return subprocess.run(
        [sys.executable, "-P", "-m", "m1serve.cli", *arguments],
        cwd=cwd,
        env={**environment, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_names_every_command(tmp_path: Path) -> None:
    done = m1serve("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert [name for name in COMMANDS if f" {name} " not in done.stdout] == []


def test_the_command_line_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, m1serve.cli.app as app\n"
        "try: app.app(['--help'])\n"
        "except SystemExit: pass\n"
        f"print([n for n in {HEAVY!r} if n in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, tmp_path: Path) -> None:
    done = m1serve(command, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("weights", "list"), "no database at"),
        (("weights", "list", "--set", "trian.lr=1"), "trian"),
        (("chat", "hi", "--base-url", "localhost:8000/v1"), "no scheme"),
        (("doctor", "--config", "missing.toml"), "no settings file"),
        (("up", "--port", "8123", "--admin-port", "8123"), "the same port 8123"),
        (("retrain", "--train", "learning_rate=1"), "no such setting: learning_rate"),
        (("chat", "hello", "--base-url", "http://127.0.0.1:9/v1"), "is `m1serve up` running?"),
        (
            ("chat", "--task", "refund/report/1", "--base-url", "http://127.0.0.1:9/v1"),
            "is `m1serve up` running?",
        ),
        (("chat", "--task", "refund/report", "--base-url", "http://127.0.0.1:9/v1"), "refund/"),
    ],
)
def test_what_cannot_work_is_one_line_and_code_2(
    arguments: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    done = m1serve(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("m1serve: ")


def test_looking_makes_no_home(tmp_path: Path) -> None:
    """Not even when the database is elsewhere, and away."""
    url = "database_url=postgresql+psycopg://me@127.0.0.1:9/m1serve"
    assert m1serve("weights", "list", "--home", "h", "--set", url, cwd=tmp_path).returncode == 2
    assert m1serve("doctor", "--home", "h", "--set", url, cwd=tmp_path).returncode == 1
    assert list(tmp_path.iterdir()) == []


def test_doctor_names_a_broker_that_is_away(tmp_path: Path) -> None:
    url = "score.broker_url=redis://:secret@127.0.0.1:9/0"
    done = m1serve("doctor", "--json", "--home", "h", "--set", url, cwd=tmp_path)
    findings = {f["subject"]: f for f in json.loads(done.stdout)}
    assert done.returncode == 1
    assert not findings["broker"]["is_good"]
    assert "127.0.0.1:9" in findings["broker"]["text"]
    assert "secret" not in done.stdout
    done = m1serve("doctor", "--json", "--home", "h", cwd=tmp_path)
    assert {f["subject"]: f for f in json.loads(done.stdout)}["broker"]["is_good"]


def test_promotion_and_rollback_answer_scripts(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'm1serve.db'}")
    for number, state in enumerate((VersionState.ACTIVE, VersionState.GATED)):
        store.weights.register(
            f"nano@{number}",
            "nano",
            str(tmp_path),
            state=state,
            parent="nano@0" if number else None,
        )
    store.weights.set_target("nano", Slot.STABLE, "nano@0", expect=None)
    store.close()
    where = ("--home", str(tmp_path), "--json")
    done = m1serve("weights", "promote", "nano@1", *where, cwd=tmp_path)
    assert json.loads(done.stdout) == {"stable": "nano@1"}, done.stderr
    done = m1serve("weights", "rollback", *where, cwd=tmp_path)
    assert json.loads(done.stdout) == {"stable": "nano@0"}, done.stderr


def test_pruning_deletes_files_and_keeps_rows(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'm1serve.db'}")
    for number in range(4):
        folder = tmp_path / "weights" / "nano" / str(number)
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
        store.weights.register(
            f"nano@{number}",
            "nano",
            str(folder),
            state=VersionState.RETIRED,
            parent=f"nano@{number - 1}" if number else None,
        )
    store.close()
    where = ("--home", str(tmp_path), "--json")
    done = m1serve("weights", "prune", "--keep", "1", *where, cwd=tmp_path)
    assert json.loads(done.stdout) == {"deleted": ["nano@2", "nano@1"], "num_bytes": 4}, done.stderr
    assert sorted(p.name for p in (tmp_path / "weights" / "nano").iterdir()) == ["0", "3"]
    done = m1serve("weights", "prune", "--keep", "1", *where, cwd=tmp_path)
    assert json.loads(done.stdout)["deleted"] == [], done.stderr
    done = m1serve("weights", "list", *where, cwd=tmp_path)
    assert len(json.loads(done.stdout)["versions"]) == 4, done.stderr


def test_doctor_names_a_truncated_weights_file(tmp_path: Path) -> None:
    model = shutil.copytree(Settings().model_dir, tmp_path / "model")
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])
    done = m1serve("doctor", "--json", "--home", "h", "--model", "model", cwd=tmp_path)
    findings = {f["subject"]: f for f in json.loads(done.stdout)}
    assert "truncated: 100000 of" in findings["model files"]["text"]


def test_an_unknown_trajectory_state_is_refused_with_those_there_are(tmp_path: Path) -> None:
    done = m1serve("trajectories", "list", "--state", "foo", cwd=tmp_path)
    assert done.returncode == 2
    assert "'eligible'" in done.stderr


def test_doctor_names_a_broken_model_directory(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    done = m1serve("doctor", "--json", "--home", "h", "--model", "model", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    findings = {f["subject"]: f for f in json.loads(done.stdout)}
    assert not findings["model"]["is_good"]
    assert "model" in findings["model"]["text"]
    assert findings["home"]["is_good"]
    assert not (tmp_path / "h").exists()


def test_the_version_is_told(tmp_path: Path) -> None:
    done = m1serve("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"m1serve {__version__}\n")


def test_runs_are_listed_and_shown_by_the_beginning_of_their_id(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'm1serve.db'}")
    run_id = store.runs.request("nano", "cli", {"lr": 1e-5})
    store.close()
    where = ("--home", str(tmp_path))
    assert run_id[:8] in m1serve("runs", "list", *where, cwd=tmp_path).stdout
    listed = json.loads(m1serve("runs", "list", "--json", *where, cwd=tmp_path).stdout)
    assert [run["state"] for run in listed] == ["requested"]
    shown = json.loads(m1serve("runs", "show", run_id[:6], *where, cwd=tmp_path).stdout)
    assert shown["overrides"] == {"lr": 1e-5}
    done = m1serve("runs", "show", "nothing", *where, cwd=tmp_path)
    assert (done.returncode, "no run begins with" in done.stderr) == (2, True)
