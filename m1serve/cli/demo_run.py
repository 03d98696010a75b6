"""The demo from a running product to its report."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from m1serve.cli import options
from m1serve.cli.demo_loop import POISON, TRAINING, DemoLoop
from m1serve.cli.demo_plan import DemoSize
from m1serve.cli.demo_product import Product
from m1serve.cli.demo_report import Cycle, Evaluation, Report
from m1serve.cli.demo_screen import Screen
from m1serve.cli.demo_tables import transcript
from m1serve.clients.agent import Agent, PlayedEpisode

CONCURRENCY = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrated:
    report: Report
    transcripts: str
    pid: int


def run_demo(
    product: Product,
    screen: Screen,
    *,
    size: DemoSize,
    seed: int,
    started: float,
    is_small: bool,
    export: Path,
) -> Demonstrated:
    """`started` is when the demo began, on the monotonic clock; trajectories go to `export`."""
    with options.open_store(product.settings) as store:
        model_id = product.settings.model.model_id
        agent = Agent(product.url, model=model_id, concurrency=CONCURRENCY)
        loop = DemoLoop(agent, store, screen, model_id=model_id, size=size, seed=seed)
        measured = asyncio.run(_measure(loop, agent, size))
        report = Report(
            before=measured.before,
            after=measured.after,
            cycles=tuple(measured.cycles),
            poisoned=measured.poisoned,
            num_requests=loop.tally.num_requests,
            failures=tuple(loop.tally.failures),
            num_trajectories=loop.tally.num_trajectories,
            num_tokens=loop.tally.num_tokens,
            num_restarts=product.num_restarts(),
            seconds=time.monotonic() - started,
            is_small=is_small,
        )
        with screen.waiting("exporting trajectories"), export.open("w") as stream:
            store.ledger.export(stream)
        return Demonstrated(
            report=report,
            transcripts=telling_transcripts(
                measured.before, measured.after, measured.played_before, measured.played_after
            ),
            pid=product.pid,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    before: Evaluation
    after: Evaluation
    played_before: list[PlayedEpisode]
    played_after: list[PlayedEpisode]
    cycles: list[Cycle]
    poisoned: Cycle


async def _measure(loop: DemoLoop, agent: Agent, size: DemoSize) -> _Measured:
    visitor = asyncio.create_task(loop.visit())
    try:
        before, played_before = await loop.evaluate("before")
        groups = size.groups_per_family
        cycles = [await loop.cycle(number, groups, TRAINING) for number in range(size.num_cycles)]
        poisoned = await loop.cycle(size.num_cycles, size.poisoned_groups_per_family, POISON)
        after, played_after = await loop.evaluate("after")
    finally:
        visitor.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await visitor
        await agent.close()
    return _Measured(
        before=before,
        after=after,
        played_before=played_before,
        played_after=played_after,
        cycles=cycles,
        poisoned=poisoned,
    )


def telling_transcripts(
    before: Evaluation,
    after: Evaluation,
    played_before: Sequence[PlayedEpisode],
    played_after: Sequence[PlayedEpisode],
) -> str:
    """One held-out task before and after: the first with tools that was failed, then solved."""
    for first, last in zip(played_before, played_after, strict=True):
        task_id = first.plan.task_id
        learned = after.successes.get(task_id) is True and before.successes.get(task_id) is False
        if learned and any(message["role"] == "tool" for message in last.messages):
            break
    return (
        f"\n{task_id} with {before.weights_version} "
        f"({_verdict(before, task_id)})\n{transcript(first.messages)}\n"
        f"\n{task_id} with {after.weights_version} "
        f"({_verdict(after, task_id)})\n{transcript(last.messages)}\n"
    )


def _verdict(evaluation: Evaluation, task_id: str) -> str:
    return {True: "solved", False: "failed", None: "not judged"}[evaluation.successes.get(task_id)]
