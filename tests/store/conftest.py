"""Stores on SQLite, and on PostgreSQL too where TEST_POSTGRES_URL names a server to play with."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import sqlalchemy as sa

from m1serve.store import Store
from m1serve.store.records import JournalEntry, JournalRecord, SessionEnded, TurnRecord
from m1serve.store.runs import RunLease
from m1serve.store.tables import Base
from m1serve.types import (
    HistoryRule,
    Mode,
    Reward,
    Sampling,
    Slot,
    StopCause,
    VersionSpan,
    VersionState,
)

POSTGRES_URL = os.environ.get("TEST_POSTGRES_URL")
BACKENDS = ["sqlite", pytest.param("postgresql", marks=pytest.mark.services)]


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "store.db"
    Store.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A migrated database of our own on the given server."""
    if POSTGRES_URL is None:
        pytest.skip("TEST_POSTGRES_URL names no PostgreSQL server")
    url = sa.engine.make_url(POSTGRES_URL).set(database=f"test_{uuid.uuid4().hex[:12]}")
    server = sa.create_engine(POSTGRES_URL, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {url.database}"))
    try:
        shown = url.render_as_string(hide_password=False)
        Store.open(shown).close()
        yield shown
    finally:
        with server.connect() as connection:
            connection.execute(sa.text(f"DROP DATABASE {url.database} WITH (FORCE)"))
        server.dispose()


@pytest.fixture(params=BACKENDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path, migrated_file: Path) -> str:
    if request.param == "sqlite":
        shutil.copy(migrated_file, tmp_path / "store.db")
        return f"sqlite:///{tmp_path / 'store.db'}"
    url: str = request.getfixturevalue("postgres_url")
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for table in reversed(Base.metadata.sorted_tables):
            connection.execute(table.delete())
    engine.dispose()
    return url


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    opened = Store.open(database_url)
    yield opened
    opened.close()


@dataclass
class Recorder:
    """Plays a serving process: turns with sensible defaults, entries with running numbers."""

    writer: str = field(default_factory=lambda: uuid.uuid4().hex)
    clock: float = 1_000_000.0
    seq: int = 0

    def turn(
        self, prompt: Sequence[int], completion: Sequence[int], **changes: object
    ) -> TurnRecord:
        self.clock += 1.0
        num = len(completion)
        values: dict[str, object] = {
            "turn_id": uuid.uuid4().hex,
            "request_id": uuid.uuid4().hex,
            "session_id": "session",
            "group_key": None,
            "task_id": "sums/train/1",
            "tenant_id": "tenant",
            "key_id": "key",
            "model_id": "nano",
            "mode": Mode.TRAIN,
            "consent": True,
            "created_at": self.clock,
            "choice": 0,
            "num_choices": 1,
            "history_rule": HistoryRule.EXACT,
            "request_hash": uuid.uuid4().hex,
            "retry_count": 0,
            "prompt_ids": tuple(prompt),
            "completion_ids": tuple(completion),
            "logprobs": (-0.5,) * num,
            "sampled_logprobs": None,
            "token_flags": (1,) * num,
            "version_spans": (VersionSpan(start=0, end=num, weights_version="nano@0"),)
            if num
            else (),
            "sampling": Sampling(),
            "stop": StopCause.EOS,
            "stop_detail": None,
            "finish_reason": "stop",
            "was_delivered": True,
            "cached_tokens": 0,
            "tokenizer_digest": "tok",
            "template_digest": "tpl",
            "numerics_digest": "num",
            "ttft_ms": 5.0,
            "total_ms": 100.0,
        }
        return TurnRecord(**{**values, **changes})  # type: ignore[arg-type]

    def end(self, session_id: str = "session", tenant_id: str = "tenant") -> SessionEnded:
        self.clock += 1.0
        return SessionEnded(session_id=session_id, tenant_id=tenant_id, at=self.clock, reason="end")

    def entry(self, record: JournalRecord) -> JournalEntry:
        self.seq += 1
        return JournalEntry(writer=self.writer, seq=self.seq, record=record)

    def entries(self, *records: JournalRecord) -> list[JournalEntry]:
        return [self.entry(record) for record in records]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@dataclass
class Workshop:
    """Shortcuts through the store for tests that begin with rewarded trajectories."""

    store: Store
    recorder: Recorder

    def episode(self, session_id: str, **changes: object) -> str:
        """One finished, unscored trajectory of one turn; returns its id."""
        turn = self.recorder.turn((1, 2, 3), (4, 5), session_id=session_id, **changes)
        end = self.recorder.end(session_id)
        self.store.ledger.ingest(self.recorder.entries(turn, end))
        (row,) = self.store.ledger.list_trajectories(session_id=session_id)
        return row.trajectory_id

    def reward(self, trajectory_id: str, value: float | None = 1.0) -> None:
        self.store.rewards.record(
            trajectory_id,
            scorer="test",
            scorer_version="1",
            reward=Reward(value=value),
            job=None,
        )

    def eligible(self, session_id: str, **changes: object) -> str:
        trajectory_id = self.episode(session_id, **changes)
        self.reward(trajectory_id)
        return trajectory_id

    def first_version(self) -> None:
        self.store.weights.register("nano@0", "nano", "/v/0", state=VersionState.ACTIVE)
        self.store.weights.set_target("nano", Slot.STABLE, "nano@0", expect=None)

    def lease(self, *, lease_s: float = 60.0, now: float | None = None) -> RunLease:
        self.store.runs.request("nano", "test")
        lease = self.store.runs.claim_next("me", lease_s, now=now)
        assert lease is not None
        return lease

    def claim(self, lease: RunLease, max_groups: int = 100, max_age_versions: int = 4) -> list[str]:
        views = self.store.runs.claim_groups(
            lease.run_id,
            lease.token,
            model_id="nano",
            parent_version=lease.parent_version or "nano@0",
            max_groups=max_groups,
            max_age_versions=max_age_versions,
        )
        return [view.trajectory_id for view in views]

    def commit(self, lease: RunLease, weights_version: str = "nano@1") -> None:
        self.store.runs.commit(
            lease.run_id,
            lease.token,
            weights_version=weights_version,
            parent="nano@0",
            path="/v/1",
            manifest_digest="digest",
            metrics={"loss": 0.5},
        )

    def state(self, trajectory_id: str) -> str:
        return self.store.ledger.trajectory(trajectory_id).state


@pytest.fixture
def workshop(store: Store, recorder: Recorder) -> Workshop:
    return Workshop(store, recorder)
