"""Examines versions in fresh engines: golden parity, then the held-out suite beside the parent.

What a version scored on a suite is kept in the ledger and never measured twice.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
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
from m1serve.online_rl.play import PlayedEpisode
from m1serve.online_rl.scorers.sandbox import Sandbox
from m1serve.online_rl.suite import (
    Suite,
    first_look,
    mean_kl,
    play_suite,
    score_suite,
    second_look,
)
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
        """Plays what was not played yet, and compares; what seems worse is played on more tasks."""
        before, after = await self._look(parent, candidate, first_look(self.gate))
        decision = decide(before, after, self.gate)
        if decision.doubtful:
            suite = second_look(self.gate, decision.doubtful)
            more_before, more_after = await self._look(parent, candidate, suite)
            before, after = before.joined(more_before), after.joined(more_after)
            decision = decide(before, after, self.gate)
        return Exam(decision=decision, candidate=after)

    def summary(self, parent: VersionRef, candidate: VersionRef) -> dict[str, float]:
        """The recorded exam as metrics; nothing when the candidate never came that far."""
        suite = first_look(self.gate)
        before, after = self.known_result(parent, suite), self.known_result(candidate, suite)
        if before is None or after is None:
            return {}
        decision = decide(before, after, self.gate)
        if decision.doubtful:
            suite = second_look(self.gate, decision.doubtful)
            more = self.known_result(parent, suite), self.known_result(candidate, suite)
            if more[0] is not None and more[1] is not None:
                before, after = before.joined(more[0]), after.joined(more[1])
        table = decide(before, after, self.gate).table
        return {
            f"gate_{name}_{row.family}": value
            for row in table
            for name, value in (
                ("parent", row.parent),
                ("candidate", row.candidate),
                ("tasks", float(row.num)),
            )
        } | {
            "gate_parent_format": before.format_rate,
            "gate_candidate_format": after.format_rate,
            "gate_kl": math.nan if after.kl is None else after.kl,
        }

    def known_result(self, version: VersionRef, suite: Suite) -> SuiteResult | None:
        """From the ledger, when every family of the suite is there."""
        rows: dict[str, Mapping[str, object]] = {}
        for row in self.store.evals.list(version.weights_version):
            if row.suite == suite.name:
                rows.setdefault(row.family, row.details)
        if not suite.tasks.keys() <= rows.keys():
            return None
        kl = next(rows[f]["kl"] for f in suite.tasks)
        return SuiteResult(
            weights_version=version.weights_version,
            episodes=tuple(e for f in suite.tasks for e in _episodes(f, rows[f]["episodes"])),
            kl=kl if isinstance(kl, float) else None,
        )

    def record(self, result: SuiteResult, suite: Suite) -> None:
        """What could not be scored is not kept: the next exam plays it again."""
        if not result.is_measured:
            return
        kl = result.kl if result.kl is not None and math.isfinite(result.kl) else None
        by_family: dict[str, list[EpisodeResult]] = {}
        for episode in result.episodes:
            by_family.setdefault(episode.family, []).append(episode)
        for family, episodes in by_family.items():
            self.store.evals.record(
                result.weights_version,
                suite.name,
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

    async def _look(
        self, parent: VersionRef, candidate: VersionRef, suite: Suite
    ) -> tuple[SuiteResult, SuiteResult]:
        """Both versions on the same tasks, one engine after the other."""
        before, after = self.known_result(parent, suite), self.known_result(candidate, suite)
        played: list[PlayedEpisode] = []
        if after is None:
            async with self._engine(candidate) as engine:
                played = await play_suite(engine, self.tok, suite)
        if before is not None and after is not None:
            return before, after
        async with self._engine(parent) as engine:
            if before is None:
                plays = await play_suite(engine, self.tok, suite)
                before = self._scored(parent, plays)
                self.record(before, suite)
            if after is None:
                after = self._scored(candidate, played, kl=await mean_kl(engine, played))
                self.record(after, suite)
        return before, after

    def _scored(
        self, version: VersionRef, plays: Sequence[PlayedEpisode], kl: float | None = None
    ) -> SuiteResult:
        episodes = score_suite(plays, self.sandbox)
        return SuiteResult(weights_version=version.weights_version, episodes=episodes, kl=kl)

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
