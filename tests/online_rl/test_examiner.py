"""The exam of a candidate over scripted engines: two looks, and nothing is played twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings, GateSettings
from m1serve.engine.base import Engine
from m1serve.engine.script import ScriptedReply
from m1serve.engine.scripted import ScriptedEngine
from m1serve.envs.base import build_problem
from m1serve.envs.clerk import play
from m1serve.online_rl.examiner import Examiner
from m1serve.online_rl.scorers.sandbox import Sandbox
from m1serve.online_rl.suite import first_look, second_look
from m1serve.store import Store
from m1serve.types import GenerateRequest, VersionRef

GATE = GateSettings(tasks_per_family=8, families=("sums", "gcd"))
PARENT, CANDIDATE = (VersionRef(weights_version=f"nano@{n}", path="") for n in (1, 2))
IsRight = Callable[[str, int], bool]
"""Whether the candidate solves the task of this family and number."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(timeout_s=20.0, memory_bytes=2**31) as box:
        yield box


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(f"sqlite:///{tmp_path / 'm1serve.db'}")
    yield store
    store.close()


class Bench:
    """The parent is always right; counts what was started."""

    def __init__(
        self, store: Store, tok: ChatTokenizer, sandbox: Sandbox, is_right: IsRight
    ) -> None:
        self.started: list[str] = []
        self._tok, self._is_right = tok, is_right
        self.examiner = Examiner(
            store=store, tok=tok, sandbox=sandbox, gate=GATE, start_engine=self.start
        )

    async def start(self, version: VersionRef) -> Engine:
        self.started.append(version.weights_version)

        def reply(request: GenerateRequest) -> ScriptedReply:
            task_id = request.id.split(":")[1]
            (say,) = play(build_problem(task_id), random.Random(task_id)).said
            family, _, number = task_id.split("/")
            is_right = version == PARENT or self._is_right(family, int(number))
            said = say.content if is_right else "I do not know."
            return ScriptedReply(text=f"<think>\n{say.thought}\n</think>\n{said}")

        return ScriptedEngine(
            reply,
            tokenizer=self._tok,
            settings=EngineSettings(kind="scripted", max_model_len=4096),
            weights_version=version.weights_version,
        )


async def test_bad_luck_at_the_first_look_is_cleared_by_the_second(
    store: Store, tok: ChatTokenizer, sandbox: Sandbox
) -> None:
    bench = Bench(store, tok, sandbox, lambda family, number: family == "gcd" or number > 2)
    exam = await bench.examiner.examine(PARENT, CANDIDATE)
    assert exam.decision.is_passed, exam.decision.reasons
    assert [(row.family, row.num) for row in exam.decision.table] == [
        ("all", 48),
        ("gcd", 24),
        ("sums", 24),
    ]
    summary = bench.examiner.summary(PARENT, CANDIDATE)
    assert summary["gate_candidate_sums"] == pytest.approx(21 / 24)
    assert (summary["gate_parent_all"], summary["gate_tasks_all"]) == (1.0, 48)
    assert bench.started == ["nano@2", "nano@1"] * 2

    again = await bench.examiner.examine(PARENT, CANDIDATE)
    assert again.decision == exam.decision
    assert len(bench.started) == 4
    assert {e.suite for e in store.evals.list()} == {
        first_look(GATE).name,
        second_look(GATE, ["sums"]).name,
    }


async def test_a_lost_family_is_refused_after_the_second_look(
    store: Store, tok: ChatTokenizer, sandbox: Sandbox
) -> None:
    bench = Bench(store, tok, sandbox, lambda family, number: family == "gcd" or number % 5 < 2)
    exam = await bench.examiner.examine(PARENT, CANDIDATE)
    assert not exam.decision.is_passed
    assert "sums fell from 1.000 to 0.4" in "; ".join(exam.decision.reasons)


async def test_a_broken_candidate_is_refused_at_once(
    store: Store, tok: ChatTokenizer, sandbox: Sandbox
) -> None:
    bench = Bench(store, tok, sandbox, lambda family, number: False)
    exam = await bench.examiner.examine(PARENT, CANDIDATE)
    assert not exam.decision.is_passed
    assert bench.started == ["nano@2", "nano@1"]


async def test_an_exam_that_nobody_could_score_is_not_kept(
    store: Store, tok: ChatTokenizer
) -> None:
    with Sandbox(timeout_s=5.0, memory_bytes=2**31, command=("/bin/false",)) as broken:
        bench = Bench(store, tok, broken, lambda family, number: True)
        exam = await bench.examiner.examine(PARENT, CANDIDATE)
    assert not exam.decision.is_passed
    assert "could not be scored" in exam.decision.reasons[0]
    assert store.evals.list() == []
