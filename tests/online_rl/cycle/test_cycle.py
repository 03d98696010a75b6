"""A whole cycle on a tiny random model: trained, committed, verified, gated, promoted or not."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from m1serve.model.weights import load_trainer, read_manifest
from m1serve.online_rl.cycle import run_cycle
from m1serve.online_rl.workshop import Workshop
from m1serve.types import Mode, Slot, VersionState

Bench = Any


def test_a_cycle_ends_with_a_promoted_version(bench: Bench) -> None:
    bench.fill()
    run_id = bench.store.runs.request("nano", "test")
    assert bench.trainer().work_once(threading.Event())
    run = bench.store.runs.get(run_id)
    assert run is not None
    assert run.state == "promoted", run.reason
    assert (run.weights_version, run.parent_version) == ("nano@1", "nano@0")
    assert bench.states() == {"consumed": 9}
    target = bench.store.weights.target("nano")
    assert target is not None
    assert target.weights_version == "nano@1"
    assert run.metrics["num_groups"] == 3
    assert run.metrics["mismatch_mean"] < 1e-5
    assert run.metrics["num_trained_tokens"] == 9 * 8
    assert {"weight_p99", "fork_weight_p99", "entropy", "grad_min", "gate_kl"} <= run.metrics.keys()
    manifest = read_manifest(Path(target.path))
    assert (manifest.parent, manifest.run_id) == ("nano@0", run_id)
    tensors, meta = load_trainer(Path(target.path))
    assert meta["num_steps"] == 2
    assert tensors["master.lm_head.weight"].dtype == torch.float32


def test_the_next_run_goes_on_from_its_parents_moments(bench: Bench) -> None:
    for round_ in range(2):
        bench.fill(name=f"round{round_}")
        bench.store.runs.request("nano", f"test {round_}")
        assert bench.trainer().work_once(threading.Event())
    target = bench.store.weights.target("nano")
    assert target is not None
    assert target.weights_version == "nano@2"
    assert load_trainer(Path(target.path))[1]["num_steps"] == 4
    # the parent's gate result came from the ledger
    rows = [e.weights_version for e in bench.store.evals.list()]
    assert Counter(rows) == {"nano@0": 1, "nano@1": 1, "nano@2": 1}


def test_eval_traffic_is_never_claimed(bench: Bench) -> None:
    bench.fill(mode=Mode.EVAL)
    run_id = bench.store.runs.request("nano", "test")
    assert bench.trainer().work_once(threading.Event())
    run = bench.store.runs.get(run_id)
    assert run is not None
    assert (run.state, run.num_claimed) == ("skipped", 0)
    assert "0 of 0 groups" in run.reason


def test_silent_groups_are_skipped_and_wait(bench: Bench) -> None:
    bench.fill(reward=lambda i: 1.0)
    run_id = bench.store.runs.request("nano", "test")
    assert bench.trainer().work_once(threading.Event())
    run = bench.store.runs.get(run_id)
    assert run is not None
    assert run.state == "skipped"
    assert bench.states() == {"eligible": 9}


def test_silent_groups_that_fill_a_batch_are_burned(bench: Bench) -> None:
    bench.fill(reward=lambda i: 1.0)
    bench.store.runs.request("nano", "test", {"max_groups": 3})
    assert bench.trainer().work_once(threading.Event())
    assert bench.states() == {"burned": 9}


def test_a_sampler_that_disagrees_stops_the_run(bench: Bench) -> None:
    bench.fill(gap=0.05)
    run_id = bench.store.runs.request("nano", "test")
    assert bench.trainer().work_once(threading.Event())
    run = bench.store.runs.get(run_id)
    assert run is not None
    assert run.state == "failed"
    assert run.reason.startswith("parity: mean |trainer - sampler| logprob is 5.00e-02")
    assert bench.states() == {"eligible": 9}


@pytest.mark.parametrize(("setting", "state"), [("release", "released"), ("burn", "burned")])
def test_a_rejected_candidate_never_serves(bench: Bench, setting: str, state: str) -> None:
    """KL limit below what any step gives; what becomes of the data is a setting."""
    bench.fill()
    bench.settings = bench.settings.model_copy(
        update={"gate": bench.settings.gate.model_copy(update={"max_kl": -1.0})}
    )
    run_id = bench.store.runs.request("nano", "test", {"after_rejection": setting})
    assert bench.trainer().work_once(threading.Event())
    run = bench.store.runs.get(run_id)
    assert run is not None
    assert run.state == "rejected"
    assert "KL to the parent" in run.reason
    version = bench.store.weights.get("nano@1")
    assert version is not None
    assert (version.state, version.reason) == (VersionState.REJECTED, run.reason)
    # the row stays with its reason, the files do not
    assert [p.name for p in (bench.settings.weights_dir / "nano").iterdir()] == ["0"]
    target = bench.store.weights.target("nano")
    assert target is not None
    assert target.weights_version == "nano@0"
    assert bench.states() == {state: 9}


def test_released_data_trains_again(bench: Bench) -> None:
    bench.fill()
    strict = bench.settings.gate.model_copy(update={"max_kl": -1.0})
    lenient = bench.settings
    bench.settings = lenient.model_copy(update={"gate": strict})
    bench.store.runs.request("nano", "first", {"after_rejection": "release"})
    bench.trainer().work_once(threading.Event())
    bench.settings = lenient
    run_id = bench.store.runs.request("nano", "second")
    bench.trainer().work_once(threading.Event())
    run = bench.store.runs.get(run_id)
    assert run is not None
    assert (run.state, run.weights_version, run.parent_version) == ("promoted", "nano@2", "nano@0")
    assert bench.states() == {"consumed": 9}


def test_a_damaged_candidate_is_rejected_by_verification(bench: Bench) -> None:
    class Damaging(Workshop):
        def verify(self) -> None:
            version = self.candidate()
            assert version is not None
            file = next((Path(version.path) / "serving").glob("*.safetensors"))
            data = bytearray(file.read_bytes())
            data[-5] ^= 1
            file.write_bytes(bytes(data))
            super().verify()

    bench.fill()
    run_id = bench.store.runs.request("nano", "test")
    assert run_cycle(bench.shop(Damaging)) == "rejected"
    run = bench.store.runs.get(run_id)
    assert run is not None
    assert run.reason.startswith("verification: nano@1 must not serve")


def test_a_directory_that_another_trainer_wrote_over_is_rejected(bench: Bench) -> None:
    """As one that was stopped for longer than its lease might do when it wakes."""

    class WrittenOver(Workshop):
        def verify(self) -> None:
            version = self.candidate()
            assert version is not None
            shutil.rmtree(version.path)
            shutil.copytree(bench.settings.weights_dir / "nano" / "0", version.path)
            other = replace(read_manifest(Path(version.path)), weights_version="nano@1")
            other.sealed().write(Path(version.path))
            super().verify()

    bench.fill(num_groups=2, size=2)
    run_id = bench.store.runs.request("nano", "test")
    assert run_cycle(bench.shop(WrittenOver)) == "rejected"
    run = bench.store.runs.get(run_id)
    assert run is not None
    assert "not what was committed" in run.reason


def test_another_stable_version_meanwhile_rejects_the_candidate(bench: Bench) -> None:
    class Overtaken(Workshop):
        def promote(self) -> None:
            self.store.weights.register("nano@7", "nano", "/elsewhere")
            self.store.weights.set_target("nano", Slot.STABLE, "nano@7")
            super().promote()

    bench.fill(num_groups=2, size=2)
    bench.store.runs.request("nano", "test")
    assert run_cycle(bench.shop(Overtaken)) == "rejected"
    version = bench.store.weights.get("nano@1")
    assert version is not None
    assert version.reason == "nano@7 became stable meanwhile, not nano@0"
