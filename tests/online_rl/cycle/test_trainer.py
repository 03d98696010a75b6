"""The trainer around the cycle: errors of ours, heartbeats, overrides, stopping."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from m1serve.config import GateSettings, ModelSettings, Settings, TrainSettings
from m1serve.errors import ConfigError, StoreError
from m1serve.online_rl.trainer import run_trainer
from m1serve.online_rl.workshop import with_overrides
from m1serve.types import VersionState

Bench = Any


def test_an_error_of_ours_fails_the_run_and_gives_the_data_back(bench: Bench) -> None:
    bench.fill(num_groups=2, size=2)
    run_id = bench.store.runs.request("nano", "test")
    trainer = bench.trainer()

    async def broken(version: object) -> object:
        raise OSError("no space left on device")

    trainer.examiner = replace(trainer.examiner, start_engine=broken)
    assert trainer.work_once(threading.Event())
    run = bench.store.runs.get(run_id)
    assert run is not None
    assert (run.state, run.reason) == ("failed", "OSError: no space left on device")
    version = bench.store.weights.get("nano@1")
    assert version is not None
    assert version.state is VersionState.REJECTED
    assert not Path(version.path).exists()
    assert bench.states() == {"released": 4}


def test_overrides_are_checked(bench: Bench) -> None:
    train = with_overrides(TrainSettings(), {"lr": 1e-3, "negate_advantages": True})
    assert (train.lr, train.negate_advantages) == (1e-3, True)
    with pytest.raises(ConfigError, match="learning_rate"):
        with_overrides(TrainSettings(), {"learning_rate": 1e-3})
    with pytest.raises(ConfigError, match="weight_max"):
        with_overrides(TrainSettings(), {"weight_max": -1})
    run_id = bench.store.runs.request("nano", "test", {"learning_rate": 1.0})
    assert bench.trainer().work_once(threading.Event())
    run = bench.store.runs.get(run_id)
    assert run is not None
    assert run.state == "failed"
    assert "learning_rate" in run.reason


def test_a_gate_without_such_tasks_is_refused_before_any_run(tiny_dir: Path) -> None:
    settings = Settings(model=ModelSettings(path=tiny_dir), gate=GateSettings(families=("chess",)))
    with pytest.raises(ConfigError, match="chess"):
        run_trainer(settings, threading.Event())


def test_no_run_is_no_work(bench: Bench) -> None:
    assert not bench.trainer().work_once(threading.Event())


def test_a_heartbeat_tells_of_a_lost_lease_and_of_a_stop(bench: Bench) -> None:
    bench.store.runs.request("nano", "test")
    old = bench.shop(lease_s=-1.0).lease
    trainer = bench.trainer()
    trainer.heartbeat_s = 0.01
    with trainer.heartbeat(old, threading.Event()) as is_lost:
        assert not is_lost.wait(0.1)
    new = bench.shop().lease
    with trainer.heartbeat(old, threading.Event()) as is_lost:
        assert is_lost.wait(5.0)
    stop = threading.Event()
    with trainer.heartbeat(new, stop) as is_lost:
        assert not is_lost.wait(0.05)
        stop.set()
        assert is_lost.wait(5.0)


def test_a_stop_cancels_a_gate_that_plays(bench: Bench) -> None:
    bench.fill(num_groups=2, size=2)
    run_id = bench.store.runs.request("nano", "test")
    trainer = bench.trainer()
    trainer.heartbeat_s = 0.01
    started, stop = threading.Event(), threading.Event()

    async def endless(version: object) -> object:
        started.set()
        await asyncio.sleep(3600)
        raise AssertionError

    trainer.examiner = replace(trainer.examiner, start_engine=endless)
    thread = threading.Thread(target=trainer.work_once, args=(stop,))
    thread.start()
    assert started.wait(30)
    stop.set()
    thread.join(timeout=10)
    assert not thread.is_alive()
    run = bench.store.runs.get(run_id)
    assert run is not None
    assert (run.state, run.phase, run.weights_version) == ("committed", "verify", "nano@1")


def test_the_trainer_process_works_until_told_to_stop(bench: Bench, tiny_dir: Path) -> None:
    bench.fill(num_groups=2, size=2)
    run_id = bench.store.runs.request("nano", "test")
    settings = bench.settings.model_copy(update={"model": ModelSettings(path=tiny_dir)})
    stop = threading.Event()
    thread = threading.Thread(target=run_trainer, args=(settings, stop))
    thread.start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        run = bench.store.runs.get(run_id)
        if run is not None and run.finished_at is not None:
            break
        time.sleep(0.05)
    stop.set()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert run is not None
    assert run.state == "promoted", run.reason


def test_a_closed_store_is_waited_for(bench: Bench, tmp_path: Path) -> None:
    trainer = bench.trainer()

    class Away:
        def claim_next(self, owner: str, lease_s: float) -> None:
            raise StoreError("connection refused")

    class AwayStore:
        runs = Away()

    trainer.store = AwayStore()  # type: ignore[assignment]
    assert not trainer.work_once(threading.Event())
