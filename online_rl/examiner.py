"""Examines versions in fresh engines: golden parity, then the held-out suite beside the parent.

What a version scored on a suite is kept in the ledger and never measured twice.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import GateSettings
from m1serve.engine.base import Engine
from m1serve.engine.staging import FP32_PARITY_MEAN_MAX
from m1serve.errors import WeightsError
from m1serve.model.manifest import Manifest, read_manifest
from m1serve.online_rl.gate import EpisodeResult, GateDecision, SuiteResult, decide
from m1serve.online_rl.scorers.sandbox import Sandbox
from m1serve.online_rl.suite import gate_tasks, mean_kl, play_suite, score_suite, suite_name
from m1serve.store import Store
from m1serve.types import VersionRef

StartEngine = Callable[[VersionRef], Awaitable[Engine]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    decision: GateDecision
    candidate: SuiteResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Examiner:
    store: Store
    tok: ChatTokenizer
    sandbox: Sandbox
    gate: GateSettings
    start_engine: StartEngine

    async def verify(self, version: VersionRef) -> float:
        """Starts an engine, which checks every file; the mean gap of its golden logprobs.

        Raises WeightsError for what must not serve.
        """
        async with self._engine(version) as engine:
            gap = await golden_gap_on(engine, read_manifest(Path(version.path)))
        if not gap <= FP32_PARITY_MEAN_MAX:
            raise WeightsError(
                f"{version.weights_version} does not reproduce its golden logprobs: mean gap "
                f"{gap:.2e}, wanted at most {FP32_PARITY_MEAN_MAX:.0e}"
            )
        return gap

    async def examine(self, parent: VersionRef, candidate: VersionRef) -> Exam:
        """Plays what was not played yet, and compares."""
        tasks = gate_tasks(self.gate)
        async with self._engine(candidate) as engine:
            played = await play_suite(engine, self.tok, tasks)
        episodes = score_suite(played, self.sandbox)
        async with self._engine(parent) as engine:
            baseline = self.known_result(parent)
            if baseline is None:
                plays = await play_suite(engine, self.tok, tasks)
                baseline = SuiteResult(
                    weights_version=parent.weights_version,
                    episodes=score_suite(plays, self.sandbox),
                )
                self.record(baseline)
            kl = await mean_kl(engine, played)
        result = SuiteResult(weights_version=candidate.weights_version, episodes=episodes, kl=kl)
        self.record(result)
        return Exam(decision=decide(baseline, result, self.gate), candidate=result)

    def summary(self, parent: VersionRef, candidate: VersionRef) -> dict[str, float]:
        """The recorded exam as metrics; nothing when the candidate never came that far."""
        before, after = self.known_result(parent), self.known_result(candidate)
        if before is None or after is None:
            return {}
        table = decide(before, after, self.gate).table
        return {
            f"gate_{name}_{row.family}": value
            for row in table
            for name, value in (("parent", row.parent), ("candidate", row.candidate))
        } | {
            "gate_parent_format": before.format_rate,
            "gate_candidate_format": after.format_rate,
            "gate_kl": math.nan if after.kl is None else after.kl,
        }

    def known_result(self, version: VersionRef) -> SuiteResult | None:
        """From the ledger, when every family of the suite is there."""
        suite, tasks = suite_name(self.gate), gate_tasks(self.gate)
        rows: dict[str, Mapping[str, object]] = {}
        for row in self.store.evals.list(version.weights_version):
            if row.suite == suite:
                rows.setdefault(row.family, row.details)
        if rows.keys() != tasks.keys():
            return None
        kl = next(iter(rows.values()))["kl"]
        return SuiteResult(
            weights_version=version.weights_version,
            episodes=tuple(e for f in tasks for e in _episodes(f, rows[f]["episodes"])),
            kl=kl if isinstance(kl, float) else None,
        )

    def record(self, result: SuiteResult) -> None:
        kl = result.kl if result.kl is not None and math.isfinite(result.kl) else None
        by_family: dict[str, list[EpisodeResult]] = {}
        for episode in result.episodes:
            by_family.setdefault(episode.family, []).append(episode)
        for family, episodes in by_family.items():
            self.store.evals.record(
                result.weights_version,
                suite_name(self.gate),
                family,
                len(episodes),
                sum(e.is_solved is True for e in episodes),
                {
                    "episodes": [
                        [e.task_id, e.is_solved, e.num_turns, e.num_well_formed] for e in episodes
                    ],
                    "kl": kl,
                },
            )

    @asynccontextmanager
    async def _engine(self, version: VersionRef) -> AsyncIterator[Engine]:
        engine = await self.start_engine(version)
        try:
            yield engine
        finally:
            await engine.close()


async def golden_gap_on(engine: Engine, manifest: Manifest) -> float:
    """Mean |logprob − recorded| under the engine's own numerics; nan without golden sequences."""
    gaps: list[float] = []
    for golden in manifest.golden:
        # an untrained model samples padding of the vocabulary, which no engine reads
        ids = tuple(takewhile(lambda t: t < engine.capabilities.vocab_size, golden.token_ids))
        scored = await engine.score(ids)
        recorded = golden.logprobs[: len(ids) - 1]
        gaps += [abs(a - b) for a, b in zip(scored.logprobs, recorded, strict=True)]
    return math.fsum(gaps) / len(gaps) if gaps else math.nan


def _episodes(family: str, rows: object) -> tuple[EpisodeResult, ...]:
    assert isinstance(rows, list)
    return tuple(
        EpisodeResult(
            task_id=task_id,
            family=family,
            is_solved=is_solved,
            num_turns=num_turns,
            num_well_formed=num_well_formed,
        )
        for task_id, is_solved, num_turns, num_well_formed in rows
    )
