"""Supervising fake children: shell one-liners in the place of server, worker and trainer."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from m1serve.cli.supervisor import Backoff, ChildSpec, Supervisor
from m1serve.errors import ConfigError

FAST = Backoff(first_s=0.02, max_s=0.05, calm_s=60.0)


def shell(name: str, script: str, *, stop_order: int = 0, grace_s: float = 5.0) -> ChildSpec:
    return ChildSpec(
        name=name,
        argv=("/bin/sh", "-c", script),
        environment=dict(os.environ),
        stop_order=stop_order,
        grace_s=grace_s,
    )


def supervisor(tmp_path: Path, *specs: ChildSpec) -> Supervisor:
    return Supervisor(
        list(specs), run_dir=tmp_path / "run", log_dir=tmp_path / "logs", backoff=FAST
    )


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


async def text_of(path: Path) -> str:
    """What a child writes into `path`, as soon as it has."""
    await asyncio.to_thread(wait_until, lambda: path.exists() and bool(path.read_text()))
    return await asyncio.to_thread(path.read_text)


def pid_files(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "run").glob("*.pid"))


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def test_a_crashed_child_is_started_again_and_counted(tmp_path: Path) -> None:
    crash_twice = (
        f"echo x >> {tmp_path}/starts; [ $(wc -l < {tmp_path}/starts) -gt 2 ] || exit 7; "
        f"echo ok > {tmp_path}/up; sleep 60"
    )
    supervised = supervisor(tmp_path, shell("server", crash_twice))
    supervised.is_ready = True
    stop = asyncio.Event()
    task = asyncio.create_task(supervised.run(stop))
    await text_of(tmp_path / "up")
    assert json.loads(await text_of(tmp_path / "run" / "restarts.json")) == {"server": 2}
    stop.set()
    await task


async def test_stopping_follows_the_order_and_leaves_no_process(tmp_path: Path) -> None:
    script = (
        "trap 'echo {0} >> {1}/order; exit 0' TERM; echo $$ > {1}/{0}; while :; do sleep 0.01; done"
    )
    specs = [
        shell(name, script.format(name, tmp_path), stop_order=order)
        for order, name in enumerate(("first", "second", "third"))
    ]
    stop = asyncio.Event()
    task = asyncio.create_task(supervisor(tmp_path, *reversed(specs)).run(stop))
    pids = [int(await text_of(tmp_path / spec.name)) for spec in specs]
    stop.set()
    await task
    assert (await text_of(tmp_path / "order")).split() == ["first", "second", "third"]
    assert not any(is_alive(pid) for pid in pids)
    assert pid_files(tmp_path) == []


async def test_a_child_that_ignores_sigterm_is_killed_with_its_group(tmp_path: Path) -> None:
    script = f"trap '' TERM; sleep 60 & echo $! > {tmp_path}/grandchild; wait; sleep 60"
    stop = asyncio.Event()
    task = asyncio.create_task(
        supervisor(tmp_path, shell("stubborn", script, grace_s=0.2)).run(stop)
    )
    grandchild = int(await text_of(tmp_path / "grandchild"))
    started = time.monotonic()
    stop.set()
    await task
    assert time.monotonic() - started < 3
    await asyncio.to_thread(wait_until, lambda: not is_alive(grandchild))


@pytest.mark.parametrize("options", ["+m", "-m"], ids=["its group", "groups of their own"])
async def test_what_a_crashed_child_leaves_behind_is_ended(tmp_path: Path, options: str) -> None:
    script = f"set {options}; sleep 60 & echo $! > {tmp_path}/grandchild; kill -9 $$"
    supervised = supervisor(tmp_path, shell("server", script))
    supervised.is_ready = True
    stop = asyncio.Event()
    task = asyncio.create_task(supervised.run(stop))
    grandchild = int(await text_of(tmp_path / "grandchild"))
    await asyncio.to_thread(wait_until, lambda: not is_alive(grandchild))
    stop.set()
    await task


async def test_a_child_that_refuses_to_start_ends_the_others_with_its_reason(
    tmp_path: Path,
) -> None:
    steady = shell("sidecar", f"echo $$ > {tmp_path}/steady; sleep 60")
    refusing = shell("server", "sleep 0.2; echo 'm1serve: no such model' >&2; exit 2")
    with pytest.raises(ConfigError, match=r"server cannot start.*no such model.*server\.log"):
        await supervisor(tmp_path, steady, refusing).run(asyncio.Event())
    assert not is_alive(int(await text_of(tmp_path / "steady")))


async def test_endless_crashing_before_ready_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exit code 1"):
        await supervisor(tmp_path, shell("worker", "exit 1")).run(asyncio.Event())


def test_the_delay_doubles_up_to_its_bound() -> None:
    backoff = Backoff(first_s=0.5, max_s=3.0, calm_s=30.0)
    assert [backoff.delay_s(n) for n in (1, 2, 3, 4, 9)] == [0.5, 1.0, 2.0, 3.0, 3.0]
