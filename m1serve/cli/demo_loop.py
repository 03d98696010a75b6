"""The demonstrated loop: play, score, retrain, swap; and the same held-out tasks before and after.

The agent speaks HTTP only. The store is read to see what the product itself recorded, and asked for
runs as `m1serve retrain` does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from m1serve.cli.demo_ledger import Outcome, deployed_swap_ms, outcomes, success_rate
from m1serve.cli.demo_plan import DemoSize, evaluation_plans, training_plans
from m1serve.cli.demo_report import Cycle, Evaluation, short
from m1serve.cli.demo_screen import Screen
from m1serve.cli.retrain import ENDED
from m1serve.clients.agent import Agent, EpisodePlan, PlayedEpisode
from m1serve.errors import StoreError
from m1serve.store import Store
from m1serve.store.run_views import RunView
from m1serve.types import Mode

POLL_S = 0.1
SCORE_TIMEOUT_S = 120.0
RUN_TIMEOUT_S = 300.0
SWAP_TIMEOUT_S = 60.0
VISIT_EVERY_S = 0.5
TRAINING: Mapping[str, object] = {"lr": 1e-4}
"""Twice the default: nano bears it, and nine cycles are all there is time for."""
POISON: Mapping[str, object] = {"negate_advantages": True, "lr": 1e-3, "minibatches": 64}
"""One group a step: the parent's momentum carries the first steps the right way."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What was asked of the server so far."""

    num_requests: int = 0
    num_tokens: int = 0
    num_trajectories: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, played: PlayedEpisode) -> None:
        self.num_requests += played.num_requests
        self.num_tokens += played.num_completion_tokens
        self.failures += played.failures


class DemoLoop:
    def __init__(
        self,
        agent: Agent,
        store: Store,
        screen: Screen,
        *,
        model_id: str,
        size: DemoSize,
        seed: int,
    ) -> None:
        self.tally = Tally()
        self._agent = agent
        self._store = store
        self._screen = screen
        self._model_id = model_id
        self._size = size
        self._seed = seed

    async def evaluate(self, label: str) -> tuple[Evaluation, list[PlayedEpisode]]:
        """Every held-out task once, in mode eval, judged by the product's own scorer."""
        plans = evaluation_plans(
            label, tasks_per_family=self._size.eval_tasks_per_family, seed=self._seed
        )
        version = await asyncio.to_thread(self._target)
        started = time.monotonic()
        played = await self._play(f"{label}: {version}, held-out tasks", plans)
        results = await self._scored(plans)
        evaluation = as_evaluation(
            label, version, {plan.task_id: results[plan.session_id] for plan in plans}
        )
        self._screen.line(
            f"{label}: {version} solves {evaluation.rate.value:.1%} of {len(plans)} held-out tasks "
            f"({time.monotonic() - started:.0f} s)"
        )
        return evaluation, played

    async def cycle(
        self, number: int, groups_per_family: int, overrides: Mapping[str, object]
    ) -> Cycle:
        """Episodes in groups, their scores, one run, and the replicas on what came of it."""
        seconds: dict[str, float] = {}
        started = time.monotonic()
        parent = await asyncio.to_thread(self._target)
        plans = training_plans(number, groups_per_family=groups_per_family, seed=self._seed)
        played = await self._play(f"cycle {number}: {parent} plays", plans)
        seconds["play"] = time.monotonic() - started
        results = await self._scored(plans)
        seconds["score"] = time.monotonic() - started - seconds["play"]
        run = await self._run(overrides)
        seconds["train"] = time.monotonic() - started - sum(seconds.values())
        serving = await asyncio.to_thread(self._target)
        swap_ms = await self._swapped(serving) if serving != parent else None
        seconds["swap"] = time.monotonic() - started - sum(seconds.values())
        self.tally.num_trajectories += len(results)
        done = Cycle(
            number=number,
            run_id=run.run_id,
            outcome=run.state,
            reason=run.reason,
            parent_version=parent,
            weights_version=serving,
            num_episodes=len(plans),
            success=success_rate(results.values()),
            num_tokens=sum(p.num_completion_tokens for p in played),
            metrics={k: float(v) for k, v in run.metrics.items() if isinstance(v, int | float)},
            swap_ms=swap_ms,
            seconds=seconds,
        )
        self._screen.line(_cycle_line(done))
        return done

    async def visit(self) -> None:
        """A lone visitor all through the demo, so that a pause of the server would be noticed."""
        number = 0
        while True:
            plan = EpisodePlan(
                task_id=f"lookup/train/{number}",
                session_id=f"visitor-{number}",
                group_key="visitor",
                mode=Mode.OFF,
            )
            self.tally.add(await self._agent.play(plan))
            number += 1
            await asyncio.sleep(VISIT_EVERY_S)

    async def _play(self, text: str, plans: Sequence[EpisodePlan]) -> list[PlayedEpisode]:
        with self._screen.counting(text, len(plans)) as count:

            def one_more(played: PlayedEpisode) -> None:
                self.tally.add(played)
                count()

            return await self._agent.play_all(plans, on_done=one_more)

    async def _scored(self, plans: Sequence[EpisodePlan]) -> dict[str, Outcome]:
        """By session id, when all of them have their verdict."""
        sessions = [plan.session_id for plan in plans]
        deadline = time.monotonic() + SCORE_TIMEOUT_S
        with self._screen.waiting("scoring"):
            while True:
                found = await asyncio.to_thread(outcomes, self._store, sessions)
                if len(found) == len(sessions):
                    return found
                if time.monotonic() > deadline:
                    failures = self.tally.failures
                    raise StoreError(
                        f"{len(sessions) - len(found)} of {len(sessions)} episodes are not scored "
                        f"after {SCORE_TIMEOUT_S:.0f} s, {len(failures)} requests failed"
                        f"{': ' + failures[-1] if failures else ''}; see logs/server.log, "
                        "logs/sidecar.log and logs/worker.log"
                    )
                await asyncio.sleep(POLL_S)

    async def _run(self, overrides: Mapping[str, object]) -> RunView:
        runs = self._store.runs
        run_id = await asyncio.to_thread(runs.request, self._model_id, "demo", dict(overrides))
        deadline = time.monotonic() + RUN_TIMEOUT_S
        with self._screen.waiting("training"):
            while time.monotonic() < deadline:
                run = await asyncio.to_thread(runs.get, run_id)
                if run is not None and run.state in ENDED:
                    return run
                await asyncio.sleep(POLL_S)
        raise StoreError(f"run {run_id} did not end in {RUN_TIMEOUT_S:.0f} s; see logs/trainer.log")

    async def _swapped(self, weights_version: str) -> float:
        deadline = time.monotonic() + SWAP_TIMEOUT_S
        with self._screen.waiting("swapping"):
            while time.monotonic() < deadline:
                swap_ms = await asyncio.to_thread(
                    deployed_swap_ms, self._store, self._model_id, weights_version
                )
                if swap_ms is not None:
                    return swap_ms
                await asyncio.sleep(POLL_S)
        raise StoreError(f"no replica serves {weights_version} after {SWAP_TIMEOUT_S:.0f} s")

    def _target(self) -> str:
        target = self._store.weights.target(self._model_id)
        if target is None:
            raise StoreError(f"nothing should serve {self._model_id}; see `m1serve weights list`")
        return target.weights_version


def as_evaluation(label: str, weights_version: str, results: Mapping[str, Outcome]) -> Evaluation:
    """Of results by task id. Raises StoreError when other weights sampled any of them."""
    number = int(weights_version.rpartition("@")[2])
    others = [task for task, r in results.items() if r.versions != (number, number)]
    if others:
        raise StoreError(
            f"{len(others)} of {len(results)} held-out episodes were not sampled by "
            f"{weights_version} alone, {others[0]} is one; nothing else may retrain during the demo"
        )
    verdicts = {task: r.is_success for task, r in results.items()}
    return Evaluation(
        label=label,
        weights_version=weights_version,
        successes={task: v for task, v in verdicts.items() if v is not None},
        unscored=tuple(task for task, v in verdicts.items() if v is None),
    )


def _cycle_line(cycle: Cycle) -> str:
    became = f"{cycle.outcome} {cycle.weights_version}" if cycle.swap_ms else cycle.outcome
    swap = f", swapped in {cycle.swap_ms:.0f} ms" if cycle.swap_ms else f" ({short(cycle.reason)})"
    times = ", ".join(f"{name} {value:.1f}" for name, value in cycle.seconds.items())
    return (
        f"cycle {cycle.number}: {cycle.parent_version} solves {cycle.success:.1%} of "
        f"{cycle.num_episodes} training episodes -> {became}{swap}; seconds: {times}"
    )
