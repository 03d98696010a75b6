"""The watcher makes an engine follow its target, whatever the store does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.engine.script import ScriptedReply
from m1serve.engine.scripted import ScriptedEngine
from m1serve.engine.watcher import VersionWatcher
from m1serve.errors import StoreError
from m1serve.types import (
    Delta,
    GenerateRequest,
    Limits,
    Slot,
    Started,
    SwapReport,
    VersionRef,
)


@dataclass
class Board:
    """The part of the store that a watcher looks at."""

    wanted: VersionRef | None = None
    is_away: bool = False
    is_read_only: bool = False
    reports: list[tuple[str, Slot, str, bool]] = field(default_factory=list)

    @property
    def weights(self) -> Board:
        return self

    def target(self, model_id: str, slot: Slot) -> VersionRef | None:
        if self.is_away:
            raise StoreError("the database is away")
        return self.wanted

    def report_deployment(
        self, replica: str, slot: Slot, weights_version: str, report: SwapReport
    ) -> None:
        if self.is_away or self.is_read_only:
            raise StoreError("the database is away")
        self.reports.append((replica, slot, weights_version, report.is_accepted))


@pytest.fixture
def engine(tok: ChatTokenizer) -> ScriptedEngine:
    return ScriptedEngine(
        lambda request: ScriptedReply(text="hi"), tokenizer=tok, weights_version="m@0"
    )


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def watcher(engine: ScriptedEngine, board: Board) -> VersionWatcher:
    return VersionWatcher(engine, board, model_id="m", replica="a", slot=Slot.STABLE, poll_s=0.01)


def version(number: int, path: Path) -> VersionRef:
    return VersionRef(weights_version=f"m@{number}", path=str(path))


async def test_it_swaps_to_the_target_and_reports(
    watcher: VersionWatcher, engine: ScriptedEngine, board: Board, tmp_path: Path
) -> None:
    await watcher.look()
    assert board.reports == []
    board.wanted = version(1, tmp_path)
    await watcher.look()
    await watcher.look()
    assert engine.weights_version == "m@1"
    assert board.reports == [("a", Slot.STABLE, "m@1", True)]


async def test_the_version_it_began_with_is_reported_too(
    watcher: VersionWatcher, board: Board, tmp_path: Path
) -> None:
    board.wanted = version(0, tmp_path)
    await watcher.look()
    assert board.reports == [("a", Slot.STABLE, "m@0", True)]


async def test_a_refused_version_is_tried_once(
    watcher: VersionWatcher, engine: ScriptedEngine, board: Board, tmp_path: Path
) -> None:
    board.wanted = version(1, tmp_path / "absent")
    await watcher.look()
    await watcher.look()
    assert engine.weights_version == "m@0"
    assert board.reports == [("a", Slot.STABLE, "m@1", False)]
    board.wanted = version(2, tmp_path)
    await watcher.look()
    assert engine.weights_version == "m@2"


async def test_it_outlives_a_store_that_is_away(
    watcher: VersionWatcher,
    engine: ScriptedEngine,
    board: Board,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    board.is_away = True
    await watcher.look()
    await watcher.look()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    board.is_away, board.wanted = False, version(1, tmp_path)
    await watcher.look()
    assert engine.weights_version == "m@1"


async def test_a_report_is_made_up_for_when_the_store_is_back(
    watcher: VersionWatcher, board: Board, tmp_path: Path
) -> None:
    board.wanted, board.is_read_only = version(1, tmp_path), True
    await watcher.look()
    assert board.reports == []
    board.is_read_only = False
    await watcher.look()
    assert board.reports == [("a", Slot.STABLE, "m@1", True)]


async def test_a_version_without_room_is_loaded_when_the_oldest_has_drained(
    tok: ChatTokenizer, board: Board, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine(
        lambda request: ScriptedReply(text="hi", delay_s=60), tokenizer=tok, weights_version="m@0"
    )
    watcher = VersionWatcher(engine, board, model_id="m", replica="a")
    old = cast(
        AsyncGenerator[Started | Delta, None],
        engine.generate(GenerateRequest(id="r", prompt_ids=(1,), limits=Limits(max_tokens=9))),
    )
    await anext(old)
    board.wanted = version(1, tmp_path)
    await watcher.look()
    board.wanted = version(2, tmp_path)
    for _ in range(3):
        await watcher.look()
    assert engine.weights_version == "m@1"
    assert [number for _, _, number, _ in board.reports] == ["m@1"]
    [said] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert said.startswith("m@2 waits to be served by a: 2 versions are held (m@0, m@1)")
    await old.aclose()
    await watcher.look()
    assert engine.weights_version == "m@2"
    assert board.reports[1:] == [("a", Slot.STABLE, "m@2", True)]


async def test_it_runs_until_cancelled(
    watcher: VersionWatcher, engine: ScriptedEngine, board: Board, tmp_path: Path
) -> None:
    running = asyncio.create_task(watcher.run())
    board.wanted = version(1, tmp_path)
    async with asyncio.timeout(5):
        while engine.weights_version != "m@1":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
