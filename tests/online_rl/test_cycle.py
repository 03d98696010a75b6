"""A whole cycle on a tiny random model: trained, committed, verified, gated, promoted or not.

The ledger is a real one, its turns are sampled from the model itself, and a crash is an exception
at a phase boundary.
"""

from __future__ import annotations

import shutil
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings, GateSettings, ModelSettings, Settings, TrainSettings
from m1serve.errors import ConfigError, FencedError, StoreError
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.weights import (
    import_model_dir,
    load_trainer,
    load_version,
    read_manifest,
    version_path,
)
from m1serve.online_rl.cycle import run_cycle
from m1serve.online_rl.scorers.sandbox import Sandbox
from m1serve.online_rl.trainer import Trainer, run_trainer
from m1serve.online_rl.workshop import Workshop, with_overrides
from m1serve.store import Store
from m1serve.store.records import JournalEntry, SessionEnded, TurnRecord
from m1serve.types import Mode, Reward, Slot, VersionState

MakeTurn = Callable[..., TurnRecord]
Speak = Callable[[tuple[int, ...], str], tuple[list[int], list[float]]]
Sampler = Callable[..., tuple[list[int], list[float]]]
PHASES = ["claim", "train", "write", "commit", "verify", "gate", "promote", "finish"]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(timeout_s=20.0, memory_bytes=2**31) as box:
        yield box


@pytest.fixture(scope="module")
def empty_home(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Path:
    """A migrated database and nano@0, made once and copied for each test."""
    settings = Settings(home=tmp_path_factory.mktemp("empty") / "home")
    Store.open(settings.database).close()
    import_model_dir(settings.weights_dir, model_id="nano", model_dir=tiny_dir)
    return settings.home


@pytest.fixture(scope="module")
def speak(empty_home: Path, sample: Sampler) -> Speak:
    """nano@0's continuations, remembered: the tests differ in what becomes of them."""
    model: M1ForCausalLM = load_version(version_path(empty_home / "weights", "nano@0"))[0].eval()

    @cache
    def continuation(prompt: tuple[int, ...], seed: str) -> tuple[list[int], list[float]]:
        return sample(model, prompt, 4, seed=zlib.crc32(seed.encode()))

    return continuation


class Bench:
    """A home with nano@0 serving, and a way to fill its ledger."""

    def __init__(
        self,
        home: Path,
        tok: ChatTokenizer,
        sandbox: Sandbox,
        make_turn: MakeTurn,
        speak: Speak,
    ) -> None:
        self.settings = Settings(
            home=home,
            engine=EngineSettings(max_model_len=112, num_slots=8),
            train=TrainSettings(lr=1e-4, minibatches=2, num_threads=1),
            gate=GateSettings(
                # of a random model's noise nothing follows
                tasks_per_family=1,
                families=("sums",),
                min_format_rate=0.0,
                max_kl=1e9,
            ),
        )
        self.tok, self.sandbox = tok, sandbox
        self._make_turn, self._speak = make_turn, speak
        self.store = Store.open(self.settings.database)
        path = version_path(self.settings.weights_dir, "nano@0")
        self.store.weights.register(
            "nano@0", "nano", str(path), state=VersionState.ACTIVE, manifest_digest="d"
        )
        self.store.weights.set_target("nano", Slot.STABLE, "nano@0", expect=None)
        self._num_entries = 0

    def fill(
        self,
        num_groups: int = 3,
        size: int = 3,
        *,
        mode: Mode = Mode.TRAIN,
        name: str = "g",
        gap: float = 0.0,
        reward: Callable[[int], float] = lambda i: float(i % 2),
    ) -> None:
        """Sessions of two turns; `gap` is added to every logprob."""
        for number in range(num_groups):
            for i in range(size):
                self._session(f"{name}{number}", i, mode, gap)
        for view in self.store.ledger.list_trajectories(limit=1000):
            if view.reward is None and view.state == "pending":
                attempt = int(view.session_id.rpartition("-")[2])
                self.store.rewards.record(
                    view.trajectory_id,
                    scorer="test",
                    scorer_version="1",
                    reward=Reward(value=reward(attempt)),
                    job=None,
                )

    def _session(self, group: str, i: int, mode: Mode, gap: float) -> None:
        session = f"{group}-{i}"
        prompt, records = [5] * 40 + [ord(c) for c in group], []
        for number in range(2):
            ids, logprobs = self._speak(tuple(prompt), f"{group}{i}{number}")
            records.append(
                self._make_turn(
                    prompt,
                    ids,
                    logprobs=[lp + gap for lp in logprobs],
                    session_id=session,
                    group_key=group,
                    mode=mode,
                    created_at=float(self._num_entries + number),
                )
            )
            prompt = [*prompt, *ids, 7, 8]
        ended = SessionEnded(session_id=session, tenant_id="t", at=99.0, reason="end")
        self.store.ledger.ingest([self._entry(r) for r in (*records, ended)])

    def _entry(self, record: TurnRecord | SessionEnded) -> JournalEntry:
        self._num_entries += 1
        return JournalEntry(writer="w" * 32, seq=self._num_entries, record=record)

    def trainer(self) -> Trainer:
        return Trainer(
            store=self.store,
            settings=self.settings,
            tok=self.tok,
            sandbox=self.sandbox,
            owner="test",
        )

    def shop(self, kind: type[Workshop] = Workshop, lease_s: float = 60.0) -> Workshop:
        lease = self.store.runs.claim_next("test", lease_s)
        assert lease is not None
        return kind(
            store=self.store,
            settings=self.settings,
            lease=lease,
            examiner=self.trainer().examiner,
        )

    def states(self) -> dict[str, int]:
        return self.store.ledger.count_trajectories("nano")


@pytest.fixture
def bench(
    tmp_path: Path,
    empty_home: Path,
    tok: ChatTokenizer,
    sandbox: Sandbox,
    make_turn: MakeTurn,
    speak: Speak,
) -> Iterator[Bench]:
    shutil.copytree(empty_home, tmp_path / "home")
    bench = Bench(tmp_path / "home", tok, sandbox, make_turn, speak)
    yield bench
    bench.store.close()


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
    assert bench.states() == {"released": 4}


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
        if run is not None and run.is_finished:
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
