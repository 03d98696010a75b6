"""A run that dies at a phase boundary resumes, and trains each trajectory once."""

from __future__ import annotations

from typing import Any

import pytest

from m1serve.errors import FencedError
from m1serve.model.weights import read_manifest
from m1serve.online_rl.cycle import run_cycle
from m1serve.online_rl.workshop import Workshop
from m1serve.store.runs import Outcome
from m1serve.types import VersionState

Bench = Any
PHASES = ["claim", "train", "write", "commit", "verify", "gate", "promote", "finish"]


class Crash(Exception):
    pass


@pytest.mark.parametrize("phase", PHASES)
def test_a_crash_at_any_boundary_resumes_and_trains_once(bench: Bench, phase: str) -> None:
    """With the phase's row written and its work not begun."""

    class Crashing(Workshop):
        def enter(self, name: str) -> None:
            super().enter(name)
            if name == phase:
                raise Crash

    bench.fill(num_groups=2, size=2)
    run_id = bench.store.runs.request("nano", "test")
    shop = bench.shop(Crashing, lease_s=-1.0)
    with pytest.raises(Crash):
        run_cycle(shop)
    claimed_before = shop.run().num_claimed
    assert run_cycle(bench.shop()) == "promoted"
    run = bench.store.runs.get(run_id)
    assert run is not None
    assert run.weights_version == "nano@1"
    assert run.fence == 2
    assert run.num_claimed == 4
    assert claimed_before in (0, 4)
    assert bench.states() == {"consumed": 4}
    assert [v.weights_version for v in bench.store.weights.list("nano")] == ["nano@1", "nano@0"]
    # the first holder comes back to life: every write of it is refused
    with pytest.raises(FencedError):
        shop.enter("late")


def test_a_crash_after_the_commit_keeps_the_committed_weights(bench: Bench) -> None:
    class Crashing(Workshop):
        def verify(self) -> None:
            raise Crash

    bench.fill(num_groups=2, size=2)
    bench.store.runs.request("nano", "test")
    with pytest.raises(Crash):
        run_cycle(bench.shop(Crashing, lease_s=-1.0))
    digest = read_manifest(bench.settings.weights_dir / "nano" / "1").digest
    assert run_cycle(bench.shop()) == "promoted"
    version = bench.store.weights.get("nano@1")
    assert version is not None
    assert version.manifest_digest == digest


def test_a_crash_after_a_rejection_removed_the_files_still_ends_the_run(bench: Bench) -> None:
    class Crashing(Workshop):
        def gate(self) -> None:
            version = self.committed()
            self.store.weights.advance(
                version.weights_version, version.state, VersionState.REJECTED, "bad"
            )

        def end(self, *args: object) -> Outcome:
            raise Crash

    bench.fill(num_groups=2, size=2)
    run_id = bench.store.runs.request("nano", "test")
    with pytest.raises(Crash):
        run_cycle(bench.shop(Crashing, lease_s=-1.0))
    assert not (bench.settings.weights_dir / "nano" / "1").exists()
    assert run_cycle(bench.shop()) == "rejected"
    run = bench.store.runs.get(run_id)
    assert run is not None
    assert (run.state, run.reason) == ("rejected", "bad")
    assert bench.states() == {"burned": 4}


def test_training_is_reproducible(bench: Bench) -> None:
    """The same claims from the same parent give the same weights, so a retry changes nothing."""

    class Crashing(Workshop):
        def commit(self, *args: object) -> None:
            raise Crash

    bench.fill(num_groups=2, size=2)
    bench.store.runs.request("nano", "test")
    digests = []
    for _ in range(2):
        with pytest.raises(Crash):
            run_cycle(bench.shop(Crashing, lease_s=-1.0))
        manifest = read_manifest(bench.settings.weights_dir / "nano" / "1")
        digests.append(manifest.tensors)
    assert digests[0] == digests[1]


def test_a_run_taken_over_writes_nothing(bench: Bench) -> None:
    bench.fill(num_groups=2, size=2)
    bench.store.runs.request("nano", "test")
    old = bench.shop(lease_s=-1.0)
    new = bench.shop()
    with pytest.raises(FencedError):
        run_cycle(old)
    assert bench.states() == {"eligible": 4}
    new.is_lost.set()
    with pytest.raises(FencedError):
        run_cycle(new)
    assert bench.states() == {"eligible": 4}
