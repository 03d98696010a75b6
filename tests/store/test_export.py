"""`m1serve trajectories` and `m1serve keys`, over a ledger with something in it."""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from m1serve.cli.app import app
from m1serve.config import load_settings
from m1serve.errors import M1ServeError
from m1serve.store import Store
from m1serve.types import TokenFlag, VersionSpan


@pytest.fixture
def program(tmp_path: Path, database_url: str) -> Any:
    def run(*arguments: str) -> Result:
        where = ("--home", str(tmp_path), "--set", f"database_url={json.dumps(database_url)}")
        return CliRunner().invoke(app, ["trajectories", *arguments, *where])

    return run


def a_mixed_turn(workshop: Any, session_id: str = "s") -> Any:
    """Sampled, forced and masked tokens from two versions, and its context in another chain."""
    store, recorder = workshop.store, workshop.recorder
    root = recorder.turn((1, 2), (3,), session_id=session_id)
    left = recorder.turn((1, 2, 3, 4), (5,), session_id=session_id)
    fork = recorder.turn(
        (1, 2, 3, 9),
        (6, 7, 8),
        session_id=session_id,
        logprobs=(-0.5, 0.0, -1.5),
        sampled_logprobs=(-0.25, 0.0, -1.5),
        token_flags=(TokenFlag.SAMPLED, TokenFlag.FORCED, TokenFlag.SAMPLED | TokenFlag.MASKED),
        version_spans=(
            VersionSpan(start=0, end=1, weights_version="nano@0"),
            VersionSpan(start=1, end=3, weights_version="nano@1"),
        ),
    )
    store.ledger.ingest(recorder.entries(root, left, fork, recorder.end(session_id)))
    return fork


def test_parquet_has_every_token_with_what_may_be_trained(
    workshop: Any, program: Any, tmp_path: Path
) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    fork = a_mixed_turn(workshop)
    out = tmp_path / "out.parquet"
    done = program("export", "--format", "parquet", "--out", str(out))
    assert done.exit_code == 0, done.output
    rows = pq.read_table(out).to_pylist()
    assert len(rows) == 4
    row = next(r for r in rows if r["turn_id"] == fork.turn_id)
    assert (row["position"], row["is_context"]) == (1, False)
    assert row["prompt_ids"] == [1, 2, 3, 9]
    assert row["completion_ids"] == [6, 7, 8]
    assert row["logprobs"] == [-0.5, 0.0, -1.5]
    assert row["sampled_logprobs"] == [-0.25, 0.0, -1.5]
    assert row["token_flags"] == [1, 2, 5]
    assert row["is_trainable"] == [True, False, False]
    assert row["weights_versions"] == ["nano@0", "nano@1", "nano@1"]
    context = next(
        r for r in rows if r["trajectory_id"] == row["trajectory_id"] and r["is_context"]
    )
    assert context["is_trainable"] == [False]


def test_an_empty_ledger_is_an_empty_parquet_file(
    store: Store, program: Any, tmp_path: Path
) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "out.parquet"
    assert program("export", "--format", "parquet", "--out", str(out)).exit_code == 0
    assert pq.read_table(out).num_rows == 0


def test_parquet_needs_a_file(store: Store, program: Any) -> None:
    done = program("export", "--format", "parquet")
    assert isinstance(done.exception, M1ServeError)
    assert "--out FILE" in str(done.exception)


def test_jsonl_is_one_line_a_trajectory(workshop: Any, program: Any) -> None:
    a_mixed_turn(workshop)
    lines = [json.loads(line) for line in program("export").stdout.splitlines()]
    assert [len(line["turns"]) for line in lines] == [2, 1]
    assert [len(line["context"]) for line in lines] == [0, 1]


def test_a_trajectory_is_shown_by_how_its_id_begins(workshop: Any, program: Any) -> None:
    ids = [workshop.episode(f"s{number}") for number in range(40)]
    shown = json.loads(program("show", ids[0][:12], "--json").stdout)
    assert shown["trajectory_id"] == ids[0]
    first = next(c for c in "0123456789abcdef" if sum(i[0] == c for i in ids) > 1)
    several = program("show", first)
    assert "begins several trajectories" in str(several.exception)
    assert "no trajectory 'xyz'" in str(program("show", "xyz").exception)
    assert "no trajectory '%'" in str(program("show", "%").exception)


def test_the_list_says_why_something_is_not_trained(workshop: Any, program: Any) -> None:
    workshop.episode("s", token_flags=(TokenFlag.FORCED, TokenFlag.FORCED))
    assert "sampling: no trainable token" in program("list").stdout


def test_a_session_is_erased_and_exported_no_more(workshop: Any, program: Any) -> None:
    workshop.episode("s")
    workshop.episode("other")
    done = json.loads(program("erase", "--session", "s", "--json").stdout)
    assert (done["num_turns"], done["trained_versions"]) == (1, [])
    (line,) = [json.loads(line) for line in program("export").stdout.splitlines()]
    assert line["session_id"] == "other"
    assert "no session 'x'" in str(program("erase", "--session", "x").exception)


def test_of_two_tenants_one_is_named(workshop: Any, program: Any) -> None:
    for tenant in ("a", "b"):
        turn = workshop.recorder.turn((1,), (2,), tenant_id=tenant)
        workshop.store.ledger.ingest(workshop.recorder.entries(turn))
    assert "tenants a, b have a session" in str(program("erase", "--session", "session").exception)
    assert "erased 1 turns" in program("erase", "--session", "session", "--tenant", "b").stdout


@pytest.mark.parametrize("scopes", [(), ("admin", "read")])
def test_a_new_key_comes_with_the_lines_that_let_it_in(
    scopes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [word for scope in scopes for word in ("--scope", scope)]
    done = CliRunner().invoke(app, ["keys", "new", "--tenant", "acme", *options])
    head, _, lines = done.stdout.partition("\n\n")
    key = head.rpartition(" ")[2]
    (given,) = tomllib.loads(lines)["serve"]["keys"]
    assert given["sha256"] == hashlib.sha256(key.encode()).hexdigest()
    assert key not in lines
    file = tmp_path / "m1serve.toml"
    file.write_text(lines)
    monkeypatch.setenv("M1SERVE_CONFIG", str(file))
    (read,) = load_settings(file).serve.keys
    assert read.scopes == (scopes or ("infer", "feedback", "read"))
    assert read.tenant == "acme"
