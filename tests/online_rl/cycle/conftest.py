"""A home with nano@0 serving and a real ledger, whose turns are sampled from the model itself."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings, GateSettings, Settings, TrainSettings
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.weights import import_model_dir, load_version, version_path
from m1serve.online_rl.scorers.sandbox import Sandbox
from m1serve.online_rl.trainer import Trainer
from m1serve.online_rl.workshop import Workshop
from m1serve.store import Store
from m1serve.store.records import JournalEntry, SessionEnded, TurnRecord
from m1serve.types import Mode, Reward, Slot, VersionState

MakeTurn = Callable[..., TurnRecord]
Speak = Callable[[tuple[int, ...], str], tuple[list[int], list[float]]]
Sampler = Callable[..., tuple[list[int], list[float]]]


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
